"""Views inside a network: attention maps, rollout, relevance, measures of its tokens and weights; nothing is changed.

Offers plain functions of a network and images, and ``survey``, which takes all in one forward pass. May import models.
"""
