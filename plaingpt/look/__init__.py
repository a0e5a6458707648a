"""What a model does with a text: its losses, its attention, its blocks, and the page of them."""
