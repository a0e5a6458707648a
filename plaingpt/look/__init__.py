"""What a model does with a text: losses, attention, blocks; and the page that shows them."""
