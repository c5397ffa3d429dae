"""An experiment file with everything that a run, a comparison and a tuning need."""

EXPERIMENT = """
[data]
name = "digits"
binary = true
validation = 0.25
[partition]
clients = 4
[model]
name = "mlp"
hidden = []
[problem]
name = "auprc"
outer = 2
inner = 6
[algorithm]
name = "fcsg-m"
alpha = 0.3
beta = 0.5
[run]
rounds = 12
q = 2
[evaluation]
metric = "ap"
[execution]
checkpoint_every = 2
[methods.fedavg]
problem = { name = "classify", batch = 8 }
tune = { eta = [0.3, 1.0] }
[methods.fcsg-m]
algorithm = { beta = 0.5 }
tune = { alpha = [0.3, 1.0] }
"""
