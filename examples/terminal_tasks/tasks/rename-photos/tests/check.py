import os

from judge import text

found = {os.path.relpath(os.path.join(d, n), "/app/photos") for d, _, ns in os.walk("/app/photos") for n in ns}
assert found == {"sea 1.jpg", "sea 2.jpg", "old/hill.jpg", "old/note.txt", "jpeg", "tree.jpg"}, found
assert text("photos/sea 2.jpg") == "sea 2.JPG" and text("photos/old/hill.jpg") == "hill.jpeg".replace("hill", "old/hill")
