"""Config keys: their declaration, composition, checks, and the errors about them."""
