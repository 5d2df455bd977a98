import unittest

from words import count


class Words(unittest.TestCase):
    def test_it(self):
        self.assertEqual(count("The cat, the dog.  A cat!"), {"the": 2, "cat": 2, "dog": 1, "a": 1})
