LENGTHS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]


def leap(year):
    return year % 4 == 0


def day(year, month, date):
    before = (year - 1) * 365 + (year - 1) // 4
    return before + sum(LENGTHS[: month - 1]) + date


def between(a, b):
    return day(*b) - day(*a)
