a=7 b=3 hex=0x10
((c = a ** b % 100, d = c + 5))
let e=a*b
i=0
while (( i < 4 )); do (( i++ )); done
until [ $i -le 2 ]; do i=$((i - 1)); done
big=$(( a > b ? a : b ))
python3 -m verl.trainer.main_ppo trainer.a=$((a / b)) trainer.b=$((-a / b)) trainer.c=$c trainer.d=$d trainer.e=$e trainer.f=$i \
  trainer.g=$((hex + 010)) trainer.h=$((a == 7 && b != 3 || 1)) trainer.i=$((1 << 10 | 1)) trainer.j=$big \
  trainer.k=$(( (a + b) * 1024 )) trainer.l=$((!a)) trainer.m=$(($a % $b))
