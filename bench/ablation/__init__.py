"""What each idea adds to the speed of decode: a model with more and more of them."""
