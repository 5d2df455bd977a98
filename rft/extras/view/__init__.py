"""Pages that show runs in a browser: read from files and ledgers alone, nothing is changed."""
