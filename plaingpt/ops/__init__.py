"""The loss, Muon and sampling, for model.py and a training step. Imports only torch and numpy."""
