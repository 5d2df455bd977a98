"""What several test files share.  Nothing in `rft` or in its documents imports it."""
