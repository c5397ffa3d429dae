"""`nestfed deploy`: a Flower app for an experiment, its certificates and keys, and a whole federation on one machine."""
