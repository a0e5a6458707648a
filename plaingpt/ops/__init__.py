"""What model.py and a step compute, with torch and numpy only: the loss, Muon, sampling."""
