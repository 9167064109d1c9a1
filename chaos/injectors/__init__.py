"""How a fault gets to its target: injectors sent there, what they find, and what undoes their work whatever becomes of them."""
