# Read first by every bash of a script that is recorded (BASH_ENV).  Commands that are neither bash's own nor tools for texts are
# written down instead of run.  RFT_RECORDS: the folder of records; RFT_ROOT: stands for the machine's root folder.

rft_count=0 rft_sleeps=0

# A record: line, depth, number of words, words, environment, an empty field, names of all variables that are set.
rft_record() {
  local rft_at rft_name=$BASHPID.$((rft_count++))
  rft_line=${RFT_LINE-}
  for ((rft_at = 1; rft_at < ${#BASH_SOURCE[@]}; rft_at++)); do
    if [[ -z $rft_line && ${BASH_SOURCE[rft_at]} != "$BASH_ENV" ]]; then rft_line=${BASH_LINENO[rft_at - 1]}; fi
  done
  {
    printf '%s\0' "$rft_line" "$BASH_SUBSHELL" "$#" "$@"
    /usr/bin/env -0
    printf '\0'
    compgen -v
  } >"$RFT_RECORDS/$rft_name"
  echo "$rft_name" >>"$RFT_RECORDS/index"
}

# A command that is not here.  A script among its words runs in a bash of its own: bash -c TEXT, ssh HOST TEXT, sbatch FILE.
command_not_found_handle() {
  local rft_line rft_at rft_word
  rft_record "$@"
  local -x RFT_LINE=$rft_line
  for ((rft_at = 2; rft_at <= $#; rft_at++)); do
    rft_word=${!rft_at}
    case ${rft_word##*/} in bash | sh | zsh | dash)
      "$BASH" "${@:rft_at+1}"
      return
      ;;
    esac
    if [[ $rft_word == *.sh && -f $rft_word ]]; then
      "$BASH" "${@:rft_at}"
      return
    elif [[ $rft_word == *[[:space:]]* && $rft_word =~ $RFT_PROGRAMS && ! $rft_word =~ ^[+~]*[A-Za-z_.]+= ]]; then
      "$BASH" -c "$rft_word"
      return
    fi
  done
  case $1 in
    sbatch | srun | ssh) "$BASH" -s ;;
    *-smi) printf '%s\n' "${RFT_PRINTS/#7/GPU 7}" ;; # a line for each GPU begins so
    *) printf '%s\n' "$RFT_PRINTS" ;;
  esac
}

# ---- commands that are here, or that a script asks for

python() { command_not_found_handle python "$@"; }
python3() { command_not_found_handle python3 "$@"; }
torchrun() { command_not_found_handle torchrun "$@"; }
ray() { command_not_found_handle ray "$@"; }
accelerate() { command_not_found_handle accelerate "$@"; }
deepspeed() { command_not_found_handle deepspeed "$@"; }
uv() { command_not_found_handle uv "$@"; }
sh() { "$BASH" "$@"; }
zsh() { "$BASH" "$@"; }
dash() { "$BASH" "$@"; }

cd() { # a folder that is not here is made
  builtin cd "$@" 2>/dev/null && return
  local rft_to=${!#}
  if [[ $rft_to == /* && $rft_to != "$RFT_ROOT"/* ]]; then rft_to=$RFT_ROOT$rft_to; fi
  command mkdir -p -- "$rft_to" && builtin cd -- "$rft_to"
}
mkdir() { # one that cannot be made here is the machine's
  command mkdir "$@" 2>/dev/null || :
}
pushd() { cd "$@"; }
popd() { builtin cd "$OLDPWD"; }

source() {
  if [[ -f $1 ]]; then builtin source "$@"; else rft_record source "$@"; fi
}
.() { source "$@"; }

exec() { # what follows it is still seen; a redirection alone changes nothing
  (($#)) || return 0
  "$@"
  builtin exit
}
if [[ ${RFT_IGNORE_EXIT-} ]]; then exit() { :; }; fi

sleep() { ((++rft_sleeps < 500)) || builtin exit 1; }
kill() { :; }
pkill() { :; }
pgrep() { :; }
killall() { :; }
ulimit() { :; }
which() { printf '%s\n' "${!#}"; }
date() { printf '%s\n' "$RFT_DATE"; }
whoami() { printf '%s\n' "$USER"; }
hostname() {
  if (($#)); then command_not_found_handle hostname "$@"; else printf '%s\n' "$HOSTNAME"; fi
}

# ---- last, as it is done before each command from here on: no failure ends the script, and folders of files that it writes are made

rft_before() {
  set +eux
  [[ $BASH_COMMAND == *'>'*/* && ${FUNCNAME[1]-} != rft_* ]] || return 0
  local rft_path
  if [[ $BASH_COMMAND =~ \>\>?\|?\ *([^\ \&\>\;\|\(\)]+/[^\ \&\>\;\|\(\)]*) ]]; then
    rft_path=$(eval "printf %s \"${BASH_REMATCH[1]//\"/}\"" 2>/dev/null)
    command mkdir -p -- "${rft_path%/*}" 2>/dev/null
  fi
  return 0
}
for rft_name in RANDOM SRANDOM SECONDS EPOCHSECONDS EPOCHREALTIME; do # bash's own differ from run to run
  unset "$rft_name"
  rft_value=RFT_$rft_name
  if [[ ${!rft_value-} ]]; then eval "$rft_name=\${!rft_value}"; fi
done
set -o functrace
trap rft_before DEBUG
