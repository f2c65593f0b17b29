# What a machine of `bench.nfs` does: sh guest.sh server|client NUMBER. Whoever connects to port 7000 gets a shell.
role=$1 number=$2
export PATH=/usr/sbin:/usr/bin:/sbin:/bin PYTHONPATH=/tree:/packages PYTHONDONTWRITEBYTECODE=1 HOME=/root
hostname "$role-$number"
for module in virtio_net nfs nfsd; do modprobe $module; done
for wait in 1 2 3 4 5 6 7 8 9 10; do [ -e /sys/class/net/eth1 ] && break; sleep 0.3; done
ip link set lo up
ip addr add 10.0.2.15/24 dev eth0 && ip link set eth0 up
ip addr add "10.9.0.$number/24" dev eth1 && ip link set eth1 up
if [ "$role" = server ]; then
    mkdir -p /export
    echo '/export 10.9.0.0/24(rw,sync,no_root_squash,no_subtree_check,fsid=0)' > /etc/exports
    mount -t nfsd nfsd /proc/fs/nfsd
    mount -t rpc_pipefs sunrpc /run/rpc_pipefs 2> /dev/null || { mkdir -p /run/rpc_pipefs; mount -t rpc_pipefs sunrpc /run/rpc_pipefs; }
    # What a client held that is gone is free after this time, and after a restart as long nobody may lock.
    echo 10 > /proc/fs/nfsd/nfsv4leasetime
    echo 10 > /proc/fs/nfsd/nfsv4gracetime
    exportfs -r
    rpc.mountd --no-nfs-version 3
    rpc.nfsd --no-nfs-version 3 4
fi
exec python3 -c '
import socket, subprocess
listening = socket.create_server(("0.0.0.0", 7000))
while True:
    connection, _ = listening.accept()
    subprocess.Popen(["sh"], stdin=connection, stdout=connection, stderr=connection, start_new_session=True)
    connection.close()
'
