"""An experiment file, and what carries it out: prepare, build, run, tune, compare."""
