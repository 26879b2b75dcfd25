"""An ablation as numbers, words, tables, figures and pages.

Offers the statistics and ``write_report``; reads runs, never starts one. Imports storage, config and figures.
"""
