"""Code that a user's configuration names: where it lies, whether it may be imported, and its import."""
