import unittest

from clamp import clamp


class Clamp(unittest.TestCase):
    def test_it(self):
        self.assertEqual([clamp(x, 0, 10) for x in (-5, 0, 7, 10, 99)], [0, 0, 7, 10, 10])
