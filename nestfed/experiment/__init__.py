"""Experiment files, and how to prepare, build, run, tune and compare them."""
