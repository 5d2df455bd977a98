from judge import text

assert text("attacks.txt").splitlines() == ['192.0.2.1 992']
