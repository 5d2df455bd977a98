class Cache:
    def __init__(self, size):
        self.size = size
        self.entries = {}

    def get(self, key, default=None):
        return self.entries.get(key, default)

    def put(self, key, value):
        if len(self.entries) >= self.size:
            self.entries.popitem()
        self.entries[key] = value
