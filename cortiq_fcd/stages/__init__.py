"""The ordered stages of a polish and what passes between them."""
