"""What model.py and a training step compute: the loss, Muon, sampling, the order of the data."""
