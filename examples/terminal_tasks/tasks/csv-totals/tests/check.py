from judge import text

assert text("totals.csv").split() == ['customer,amount', 'dee,11311.28', 'ann,8021.50', 'bob,5706.97', 'cy,4699.30']
