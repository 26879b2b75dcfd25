"""YAML files and flags to one checked, typed, frozen experiment.

Offers ``resolve``, which reports every problem of a config at once, before data or model are touched.
Imports models, data, storage, training and weights.
"""
