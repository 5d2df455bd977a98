ITEMS = []


class Stack:
    def __init__(self):
        self.items = ITEMS

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop(0) if self.items else None
