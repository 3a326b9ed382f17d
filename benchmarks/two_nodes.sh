#!/usr/bin/env bash
# Two "nodes" on one machine: network namespaces joined by a rate-limited link, and one torchrun job across both.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: two_nodes.sh [--rate RATE] [--per-node N] [--port PORT] -- SCRIPT [ARGUMENT...]
       two_nodes.sh [options] -- -m MODULE [ARGUMENT...]

Runs `torchrun --nnodes 2` of SCRIPT, or of MODULE, with one half of the ranks in each of two network namespaces.
What passes between the two is limited to RATE in each direction; the ranks of one node talk over its loopback.

  --rate RATE    as tc writes it, such as 200mbit or 1gbit; none: unlimited (default 200mbit)
  --per-node N   ranks on each node (default 1)
  --port PORT    where node 0's rendezvous listens; inside its namespace, so no other program is in the way
                 (default 29777)

The Python is $PYTHON, else `python`; OMP_NUM_THREADS is 1 unless set. The status is 0 if both nodes ended well, else
that of the node that failed first; the other is then ended. Needs Linux, root and iproute2; what it made, namespaces and
links named ng* and nv*, is removed when it ends. The link has no delay of its own.
TEXT
}

refuse() {
  echo "two_nodes.sh: $1" >&2
  exit 2
}

rate=200mbit per_node=1 port=29777
while (($#)); do
  case $1 in
    --rate | --per-node | --port)
      (($# > 1)) || refuse "$1 needs a value"
      case $1 in
        --rate) rate=$2 ;;
        --per-node) per_node=$2 ;;
        --port) port=$2 ;;
      esac
      shift 2
      ;;
    -h | --help) usage; exit 0 ;;
    --) shift; break ;;
    *) refuse "unknown option $1 (--help tells the options)" ;;
  esac
done
(($#)) || refuse "no script given after -- (--help tells the usage)"
[[ $rate == none || $rate =~ ^[0-9]+(\.[0-9]+)?[kmgt]?bit$ ]] || refuse "--rate $rate is neither like 200mbit nor none"
[[ $per_node =~ ^[1-9][0-9]*$ ]] || refuse "--per-node $per_node is no whole number above 0"
[[ $port =~ ^[1-9][0-9]*$ ]] || refuse "--port $port is no port"
for tool in ip tc; do
  command -v "$tool" >/dev/null || refuse "$tool is missing: install iproute2"
done
((EUID == 0)) || refuse "namespaces need root"

tag=$$
node() { echo "ng$tag-$1"; }

signal() {
  local i
  for i in 0 1; do
    ip netns pids "$(node $i)" 2>/dev/null | xargs -r kill "-$1" 2>/dev/null || true
  done
}

cleanup() {
  trap - EXIT
  local i
  signal TERM
  # A rank that waits for one that is gone does not hear it.
  for i in {1..20}; do
    [[ -n $(ip netns pids "$(node 0)" 2>/dev/null)$(ip netns pids "$(node 1)" 2>/dev/null) ]] || break
    sleep 0.2
  done
  signal KILL
  for i in 0 1; do
    ip netns del "$(node $i)" 2>/dev/null || true
    ip link del "nv$tag$i" 2>/dev/null || true
  done
  ip link del "ng$tag" 2>/dev/null || true
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

ip link add "ng$tag" type bridge
ip link set "ng$tag" up
for i in 0 1; do
  ip netns add "$(node $i)"
  ip link add "nv$tag$i" type veth peer name eth0 netns "$(node $i)"
  ip link set "nv$tag$i" master "ng$tag" up
  ip -n "$(node $i)" link set lo up
  ip -n "$(node $i)" link set eth0 up
  ip -n "$(node $i)" addr add "10.77.0.$((i + 1))/24" dev eth0
  # A burst of 128 KiB keeps up 1 Gbit/s with timers of a millisecond; 50 ms of queue, then packets are dropped.
  [[ $rate == none ]] || tc -n "$(node $i)" qdisc add dev eth0 root tbf rate "$rate" burst 128kb latency 50ms
done

export GLOO_SOCKET_IFNAME=eth0 TP_SOCKET_IFNAME=eth0 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
for i in 0 1; do
  # Not a function in the background: what is waited for must be torchrun itself, not a shell around it.
  ip netns exec "$(node $i)" "${PYTHON:-python}" -m torch.distributed.run --nnodes 2 --node-rank "$i" \
    --nproc-per-node "$per_node" --master-addr 10.77.0.1 --master-port "$port" "$@" &
done
code=0
for _ in 0 1; do
  wait -n || { code=$?; break; }
done
exit "$code"
