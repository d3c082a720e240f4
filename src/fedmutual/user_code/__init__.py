"""The user's own code: find the file of a module, check whether the module may be imported, and import the module."""
