"""Records what a model does with a text: losses, attention, blocks. Builds the page of look.py."""
