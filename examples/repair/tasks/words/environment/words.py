def count(text):
    found = {}
    for word in text.split(" "):
        found[word] = found.get(word, 0) + 1
    return found
