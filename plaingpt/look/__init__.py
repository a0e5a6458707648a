"""Records a model's losses, attention and block outputs for a text. Builds the page of look.py."""
