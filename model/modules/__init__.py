"""What takes the place of a module: the operators, their register, and the injection by rules."""
