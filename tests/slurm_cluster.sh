#!/usr/bin/env bash
# A real SLURM cluster on this machine for the tests marked `slurm`: munged, mariadbd, slurmdbd, slurmctld and four
# slurmd with 8 fake GPUs each, all on the loopback, without systemd, everything in one folder. Needs root, and the
# packages of Debian or Ubuntu.
#
#   tests/slurm_cluster.sh up                 start whatever does not run yet; installs packages that are missing
#   eval "$(tests/slurm_cluster.sh env)"      point this shell at it
#   tests/slurm_cluster.sh down               cancel its jobs and stop it; job ids and accounting are kept
#   tests/slurm_cluster.sh purge              stop it and remove its folder
#
# For faults, where DAEMON is slurmctld, slurmdbd or slurmd-node<i>:
#
#   tests/slurm_cluster.sh kill DAEMON        kill -9; the steps that a slurmd has started live on
#   tests/slurm_cluster.sh start DAEMON       start it again, unless it runs
#   tests/slurm_cluster.sh restart DAEMON     stop it in good order and start it again
#
# Partition `main` is the default; jobs in `low` are preempted by jobs in `main`, with ten seconds of grace. A node whose
# slurmd is silent for ten seconds is down. Account `root` is the default; `small` may have 8 jobs in the queue.
set -euo pipefail

root=${ISOFLOP_SLURM_ROOT:-${TMPDIR:-/tmp}/isoflop-slurm}
nodes=${ISOFLOP_SLURM_NODES:-4} cpus=${ISOFLOP_SLURM_CPUS:-2} gpus=${ISOFLOP_SLURM_GPUS:-8} # of each virtual node
port=${ISOFLOP_SLURM_PORT:-17800}
dbd_port=$((port + 1)) ctld_port=$((port + 2)) sql_port=$((port + 3)) node_port=$((port + 10))
packages=(slurm-wlm slurmdbd munge mariadb-server)
export SLURM_CONF=$root/slurm.conf

say() { echo "slurm_cluster: $*" >&2; }

wait_for() { # SECONDS COMMAND...
  local tries=$(($1 * 10))
  shift
  for ((; tries > 0; tries--)); do
    if timeout 10 "$@" >/dev/null 2>&1; then return 0; fi
    sleep 0.1
  done
  say "this never came true: $*"
  tail -n 15 "$root"/log/*.log >&2 || true
  return 1
}

# Process ids are reused: one counts as ours only if its command line or environment names our folder.
ours() { cat "/proc/$1/cmdline" "/proc/$1/environ" 2>/dev/null | grep -aqF -- "$root/"; }

running() { # NAME: whether the daemon with that pid file runs
  local pid
  pid=$(cat "$root/run/$1.pid" 2>/dev/null) && [[ -n $pid ]] && ours "$pid"
}

stop() { # NAME
  local pid
  if running "$1"; then
    pid=$(cat "$root/run/$1.pid")
    kill "$pid" 2>/dev/null || true
    for _ in {1..100}; do [[ -d /proc/$pid ]] && sleep 0.1 || break; done
    if [[ -d /proc/$pid ]]; then kill -9 "$pid"; fi
  fi
  rm -f "$root/run/$1.pid"
}

start() { # DAEMON
  running "$1" && return
  case $1 in
    slurmdbd) slurmdbd ;; # reads the slurmdbd.conf beside $SLURM_CONF
    slurmctld) slurmctld -f "$SLURM_CONF" ;;
    slurmd-*) slurmd -N "${1#slurmd-}" -f "$SLURM_CONF" ;;
    *)
      say "the daemon is ${1:-missing}; it must be slurmctld, slurmdbd or slurmd-node1 to slurmd-node$nodes"
      return 2
      ;;
  esac
}

kill_hard() { # DAEMON
  if ! running "$1"; then
    say "${1:-nothing} does not run"
    return 1
  fi
  kill -9 "$(cat "$root/run/$1.pid")"
}

install_packages() {
  local missing=() name
  for name in "${packages[@]}"; do
    dpkg-query -W -f='${db:Status-Status}' "$name" 2>/dev/null | grep -qx installed || missing+=("$name")
  done
  if ((${#missing[@]} == 0)); then return; fi
  say "installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  # The packages' own daemons must not start; machines with systemd would start them from the packages' scripts.
  if [[ ! -e /usr/sbin/policy-rc.d ]]; then
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
    chmod +x /usr/sbin/policy-rc.d
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
  fi
  apt-get -o DPkg::Lock::Timeout=300 update -qq
  apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends "${missing[@]}" </dev/null >&2
}

write_files() {
  mkdir -p "$root"/{state,spool,log,munge,devices,run}
  chmod 755 "$root" && chmod 711 "$root/munge" # munged refuses a folder that others may write
  [[ -s $root/munge/munge.key ]] || (umask 077 && head -c 1024 /dev/urandom >"$root/munge/munge.key")
  # A cluster made anew must not hand out the job ids of an old one: files and states that name jobs outlive it.
  [[ -s $root/first_job_id ]] || echo $(($(date +%s) % 600000 * 100 + 1)) >"$root/first_job_id"
  local i
  for ((i = 0; i < gpus; i++)); do # a fake GPU is another /dev/null
    [[ -c $root/devices/gpu$i ]] || mknod "$root/devices/gpu$i" c 1 3
  done
  printf 'Name=gpu File=%s\n' "$root/devices/gpu[0-$((gpus - 1))]" >"$root/gres.conf"
  cat >"$root/init.sql" <<END
CREATE DATABASE IF NOT EXISTS slurm_acct_db;
CREATE USER IF NOT EXISTS slurm@'127.0.0.1' IDENTIFIED BY 'slurm';
GRANT ALL ON slurm_acct_db.* TO slurm@'127.0.0.1';
END
  cat >"$root/slurmdbd.conf" <<END
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort=$dbd_port
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$root/munge/munge.sock
CommunicationParameters=NoInAddrAny
PidFile=$root/run/slurmdbd.pid
LogFile=$root/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$sql_port
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
END
  chmod 600 "$root/slurmdbd.conf" # slurmdbd refuses a password that others may read
  # cred_expire is also how long a requeued job waits before it starts again: 120 s unless said, 5 s at the least.
  cat >"$root/slurm.conf" <<END
ClusterName=isoflop
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$root/munge/munge.sock,cred_expire=5
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
FirstJobId=$(cat "$root/first_job_id")
SlurmctldPort=$ctld_port
SlurmctldPidFile=$root/run/slurmctld.pid
SlurmctldLogFile=$root/log/slurmctld.log
SlurmctldParameters=preempt_send_user_signal
StateSaveLocation=$root/state
SlurmdPidFile=$root/run/slurmd-%n.pid
SlurmdLogFile=$root/log/slurmd-%n.log
SlurmdSpoolDir=$root/spool/%n
SlurmdParameters=config_overrides
SlurmdTimeout=10
ReturnToService=1
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,bf_continue
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=10
CompleteWait=0
JobAcctGatherType=jobacct_gather/linux
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$dbd_port
AccountingStoragePass=$root/munge/munge.sock
AccountingStorageTRES=gres/gpu
AccountingStorageEnforce=limits,qos
GresTypes=gpu
NodeName=node[1-$nodes] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[$((node_port + 1))-$((node_port + nodes))] CPUs=$cpus RealMemory=64000 Gres=gpu:$gpus
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60 PriorityTier=10 PreemptMode=OFF
PartitionName=low Nodes=ALL MaxTime=INFINITE DefaultTime=60 PriorityTier=1 PreemptMode=REQUEUE GraceTime=10
END
}

start_database() {
  [[ -d $root/mysql/mysql ]] || mariadb-install-db --no-defaults --user=root --datadir="$root/mysql" --skip-test-db \
    --auth-root-authentication-method=normal >"$root/log/mariadb-install.log" 2>&1
  nohup setsid mariadbd --no-defaults --user=root --datadir="$root/mysql" --init-file="$root/init.sql" \
    --socket="$root/run/mysql.sock" --pid-file="$root/run/mariadbd.pid" --bind-address=127.0.0.1 --port="$sql_port" \
    --skip-name-resolve --innodb-flush-log-at-trx-commit=0 </dev/null >"$root/log/mariadbd.log" 2>&1 &
  wait_for 60 mariadb --no-defaults -h127.0.0.1 -P"$sql_port" -uslurm -pslurm slurm_acct_db -e 'select 1'
}

every_node_is_usable() {
  [[ $(sinfo -h -N -p main -t idle,mix,alloc,comp -o %N | sort -u | wc -l) -eq $nodes ]]
}

up() {
  if ((EUID != 0)); then
    say "only root can start the cluster, for its daemons and packages"
    return 2
  fi
  install_packages
  write_files
  running munged || munged --socket="$root/munge/munge.sock" --key-file="$root/munge/munge.key" \
    --pid-file="$root/run/munged.pid" --log-file="$root/log/munged.log" --seed-file="$root/munge/munged.seed"
  wait_for 10 munge -n -S "$root/munge/munge.sock"
  running mariadbd || start_database
  start slurmdbd
  wait_for 60 sacctmgr -n list cluster
  if ! sacctmgr -n list cluster format=cluster | grep -qw isoflop; then
    sacctmgr -i add cluster isoflop >/dev/null
    sacctmgr -i add account small >/dev/null
    sacctmgr -i add user root account=small MaxSubmitJobs=8 >/dev/null
  fi
  start slurmctld
  wait_for 30 scontrol ping
  local i
  for ((i = 1; i <= nodes; i++)); do start "slurmd-node$i"; done
  local tries
  for ((tries = 300; tries > 0; tries--)); do every_node_is_usable && break || sleep 0.1; done
  sinfo -N -o '%N %P %t %c %G' >&2
  every_node_is_usable
}

down() {
  if [[ ! -f $SLURM_CONF ]]; then return; fi
  if running slurmctld && timeout 10 scontrol ping 2>/dev/null | grep -q UP; then
    { squeue -h -o %A 2>/dev/null | sort -u | xargs -r scancel 2>/dev/null; } || true
    for _ in {1..150}; do [[ -z $(squeue -h 2>/dev/null) ]] && break || sleep 0.1; done
  fi
  local file name directory
  for file in "$root"/run/slurmd-*.pid; do
    if [[ -e $file ]]; then stop "$(basename "$file" .pid)"; fi
  done
  for name in slurmctld slurmdbd mariadbd munged; do stop "$name"; done
  for directory in /proc/[0-9]*; do # a step's own daemon survives the slurmd that started it
    if [[ $(cat "$directory/comm" 2>/dev/null) == slurmstepd ]] && ours "${directory#/proc/}"; then
      kill -9 "${directory#/proc/}" 2>/dev/null || true
    fi
  done
}

case ${1:-} in
  up) up ;;
  env) echo "export SLURM_CONF=$SLURM_CONF" ;;
  down) down ;;
  purge) down && rm -rf "$root" ;;
  kill) kill_hard "${2:-}" ;;
  start) start "${2:-}" ;;
  restart) stop "${2:-}" && start "${2:-}" ;;
  *)
    say "the first argument is ${1:-missing}; it must be up, env, down, purge, kill, start or restart"
    exit 2
    ;;
esac
