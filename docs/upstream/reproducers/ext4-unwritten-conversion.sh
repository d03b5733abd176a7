#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR MIT
#
# Makes the conversion of an unwritten extent of ext4 fail, because the block with the file's
# extents cannot be read.
#
#   ext4-unwritten-conversion.sh DISK DIR
#
# As root. DISK is a block device, whose contents are lost. DIR is a directory. Needs dmsetup,
# mkfs.ext4, debugfs, the sync of coreutils, and CONFIG_DM_DELAY. The exit status is 1 if the data is
# lost although fsync() succeeds, and 0 if not.
set -eu
disk=$1 dir=$2
file=$dir/file
sectors=$(blockdev --getsz "$disk")

load() {
	dmsetup reload data
	dmsetup suspend --nolockfs data
	dmsetup resume data
}

linear() {
	echo "0 $sectors linear $disk 0"
}

# Writes a page of the letter A.
write() {
	head -c 4096 /dev/zero | tr '\0' A | dd of="$file" bs=4096 seek="$1" conv=notrunc 2>/dev/null
}

read_page() {
	dd if="$file" bs=4096 skip="$1" count=1 2>/dev/null | tr '\0' 0 | head -c 1
}

# Prints a table in which the block $1 cannot be read, and a write of the block $2 takes 10 s.
table() {
	at=0
	for place in $(printf '%s:extents\n%s:data\n' "$1" "$2" | sort -n); do
		first=$((${place%:*} * 8))
		echo "$at $((first - at)) linear $disk $at"
		case $place in
		*:extents) echo "$first 8 delay /dev/mapper/errors 0 0 $disk $first 0" ;;
		*:data) echo "$first 8 delay $disk $first 0 $disk $first 10000 $disk $first 0" ;;
		esac
		at=$((first + 8))
	done
	echo "$at $((sectors - at)) linear $disk $at"
}

# Without a journal, which may keep the extents in memory.
mkfs.ext4 -q -F -b 4096 -O ^has_journal "$disk"
linear | dmsetup create data
echo "0 8 error" | dmsetup create errors
mount -t ext4 /dev/mapper/data "$dir"
fallocate -l 65536 "$file"
# Every second page is written, so the file has more extents than its inode has space for.
for page in 0 2 4 6 8 10 12 14; do
	write $page
	sync "$file"
done
umount "$dir"
extents=$(debugfs -R "stat file" /dev/mapper/data 2>/dev/null | sed -n 's/.*(ETB0):\([0-9]*\).*/\1/p')
data=$(debugfs -R "bmap file 1" /dev/mapper/data 2>/dev/null | sed 's/ .*//')
mount -t ext4 /dev/mapper/data "$dir"

write 1
table "$extents" "$data" | load
sync "$file" &
job=$!
# While the data is being written, the block with the extents leaves the cache.
for _ in 1 2 3 4 5; do
	sleep 1
	sync /dev/mapper/data
	echo 1 >/proc/sys/vm/drop_caches
done
status=0
wait $job || status=$?
echo "fsync ended with status $status"
dmesg | grep "failed to convert" | tail -n 1
linear | load
echo "page cache: $(read_page 1)"
sync "$file" && echo "a second fsync succeeded"
echo 1 >/proc/sys/vm/drop_caches
found=$(read_page 1)
echo "evicted: $found"
umount "$dir"
dmsetup remove data
dmsetup remove errors
if [ "$found" != A ] && [ $status = 0 ]; then
	echo WRONG
	exit 1
fi
echo right
