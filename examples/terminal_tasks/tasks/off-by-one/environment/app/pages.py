def count(items, size):
    return len(items) // size


def page(items, size, number):
    start = number * size
    return items[start : start + size - 1]
