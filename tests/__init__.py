"""The tests; a package, so that they share `tests.helpers`."""
