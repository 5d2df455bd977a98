# One value in each way of quoting.
single='a b'
double="say \"hi\" to \$USER"
ansi=$'tab\there \x41\u00e9'
glued=pre'mid'"post"\ end
empty=""
python3 -m verl.trainer.main_ppo trainer.a='"'"$single"'"' trainer.b="'$double'" trainer.c=\'"$ansi"\' trainer.d="$glued" \
  trainer.e=$empty trainer.f='[1, 2.5, null, true, "x,y"]' trainer.g='{k: 1, "two words": [a, {b: -3}]}' \
  trainer.h="'it\\'s'" trainer.i=[a,b] trainer.j='${trainer.k}' trainer.k="\${data.x}/y" trainer.l='\[x\]' trainer.m=null \
  trainer.n=None trainer.o='"1e-3"' trainer.p=1_000 trainer.q=-0.5 trainer.r=~/models trainer.s=a=b trainer.t=0x10 trainer.u=010 \
  trainer.v=inf trainer.w=True trainer.x="" trainer.y=$'' trainer.z=10.
