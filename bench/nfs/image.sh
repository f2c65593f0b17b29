#!/bin/sh
# Makes DIR/root.img, DIR/vmlinuz and DIR/initrd.img: Debian 12 with a kernel that has NFS, for machines of `bench.nfs`.
# Root on Debian, with debootstrap and e2fsprogs: bench/nfs/image.sh DIR. MIRROR=URL names another than debootstrap's own.
set -eu
dir=$1
mkdir -p "$dir"
trap 'rm -rf "$dir/root"' EXIT
[ -d "$dir/root" ] || debootstrap --variant=minbase \
    --include=python3,nfs-kernel-server,nfs-common,iproute2,kmod,udev,linux-image-amd64 bookworm "$dir/root" ${MIRROR:-}
cat > "$dir/root/guest" <<'INIT'
#!/bin/sh
# The first process of a machine: the tree is the host's, by 9p.
mount -o remount,rw /
mountpoint -q /proc || mount -t proc proc /proc
mountpoint -q /sys || mount -t sysfs sysfs /sys
mkdir -p /tree /packages
modprobe 9pnet_virtio && modprobe 9p
for share in tree packages; do mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=262144 $share /$share; done
exec /bin/sh /tree/bench/nfs/guest.sh "$@"
INIT
chmod +x "$dir/root/guest"
cp "$dir"/root/boot/vmlinuz-* "$dir/vmlinuz"
cp "$dir"/root/boot/initrd.img-* "$dir/initrd.img"
rm -rf "$dir"/root/var/cache/apt "$dir"/root/var/lib/apt/lists
truncate -s 3G "$dir/root.img"
mkfs.ext4 -q -F -d "$dir/root" "$dir/root.img"
