import unittest

from stack import Stack


class Stacks(unittest.TestCase):
    def test_order(self):
        s = Stack()
        s.push(1)
        s.push(2)
        self.assertEqual((s.pop(), s.pop()), (2, 1))
        self.assertRaises(IndexError, s.pop)

    def test_each_has_its_own(self):
        a = Stack()
        b = Stack()
        a.push(1)
        self.assertRaises(IndexError, b.pop)
