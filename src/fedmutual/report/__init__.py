"""A page, a table and a verdict from run folders. Reads them only; never trains."""
