// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Drives the device from guest user space, without the module, until SIGTERM.
 *
 * It prints a line at each change: "generation G" and, for each generation other than 0,
 * "stored" when it has put a page with a pattern. At SIGUSR1 it gets that page and prints "keep
 * hit", "keep miss" or "keep stale". If a request stays unanswered for a second, it prints
 * "unanswered" and later "answered". A wrong byte ends it with "wrong". At SIGUSR2 it gets the page
 * into memory to which only the device writes, does not read the page, and prints "held". At the
 * next SIGUSR2 it compares the page and prints "held right".
 *
 * The program first unbinds the kernel's virtio-pci, because only one driver may drive the device.
 * Memory for the device is locked and barred from compaction, and freed only after a reset.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/virtio_config.h>
#include <linux/virtio_pci.h>
#include <linux/virtio_ring.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "virtio_tmem.h"

#define VENDOR 0x1af4
#define DEVICE (0x1040 + VIRTIO_ID_TMEM)
#define PCI_COMMAND 4
#define PCI_COMMAND_MEMORY 2
#define PCI_COMMAND_MASTER 4
#define PCI_COMMAND_INTX_DISABLE 0x400
#define PCI_CAPABILITY_LIST 0x34
#define PCI_CAP_ID_VNDR 9
#define PAGE 4096
#define RING_SIZE 16 /* size of the queues; each part of a queue fits into a page */
#define KEEP_OBJECT 7
#define KEEP_INDEX 3
#define UNANSWERED_MS 1000

/* A virtqueue with at most one request in flight. Each of its parts has a page of its own. */
struct queue {
	struct vring_desc *desc;
	struct vring_avail *avail;
	volatile struct vring_used *used;
	uint8_t *readable;	/* request header, then the body of the request type */
	uint8_t *data;		/* a page of data, readable or writable */
	uint8_t *writable;	/* answer header, then the results of pages */
	uint64_t phys[6];	/* addresses of the six pages above, in order */
	uint64_t target;	/* destination of data: physical address of `data` or of `held` */
	volatile uint16_t *notify;
	uint16_t sent;
};

static char device_path[256];
static volatile uint8_t *common, *notify, *device;
static uint32_t notify_multiplier;
static struct queue control, request;
static volatile sig_atomic_t wanted_keep, wanted_hold, wanted_end;

static void die(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	fprintf(stderr, "tmemcfg: ");
	vfprintf(stderr, format, arguments);
	fprintf(stderr, "\n");
	va_end(arguments);
	exit(1);
}

static void say(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vprintf(format, arguments);
	va_end(arguments);
	printf("\n");
	fflush(stdout);
}

static void nap_ms(long ms)
{
	struct timespec time = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};

	nanosleep(&time, NULL);
}

static int64_t now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Functions for PCI: find the device, take it from the kernel, map its regions. */

static unsigned long read_number(const char *directory, const char *name)
{
	char path[512], text[64] = "";
	FILE *file;

	snprintf(path, sizeof(path), "%s/%s", directory, name);
	file = fopen(path, "r");
	if (!file || !fgets(text, sizeof(text), file))
		die("cannot access %s: %s", path, strerror(errno));
	fclose(file);
	return strtoul(text, NULL, 0);
}

static void write_text(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY);

	if (fd < 0 || write(fd, text, strlen(text)) != (ssize_t)strlen(text))
		die("cannot access %s: %s", path, strerror(errno));
	close(fd);
}

static void find_device(void)
{
	const char *root = "/sys/bus/pci/devices";
	DIR *directory = opendir(root);
	struct dirent *entry;
	char path[512];

	while (directory && (entry = readdir(directory))) {
		if (entry->d_name[0] == '.')
			continue;
		snprintf(device_path, sizeof(device_path), "%s/%.32s", root, entry->d_name);
		if (read_number(device_path, "vendor") != VENDOR ||
		    read_number(device_path, "device") != DEVICE)
			continue;
		snprintf(path, sizeof(path), "%s/driver/unbind", device_path);
		if (access(path, W_OK) == 0)
			write_text(path, entry->d_name);
		closedir(directory);
		return;
	}
	die("there is no PCI device %04x:%04x", VENDOR, DEVICE);
}

static volatile uint8_t *map_bar(int number)
{
	static volatile uint8_t *mapped[6];
	struct stat status;
	char path[512];
	int fd;

	if (number > 5)
		die("a virtio capability names BAR %d, which does not exist", number);
	if (mapped[number])
		return mapped[number];
	snprintf(path, sizeof(path), "%s/resource%d", device_path, number);
	fd = open(path, O_RDWR | O_SYNC);
	if (fd < 0)
		die("cannot access %s: %s", path, strerror(errno));
	/* fstat() gives the region's size. lseek() on Linux 6.1 uses another inode, of size 0. */
	if (fstat(fd, &status))
		die("cannot access %s: %s", path, strerror(errno));
	mapped[number] = mmap(NULL, status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (mapped[number] == MAP_FAILED)
		die("mmap %s: %s", path, strerror(errno));
	close(fd);
	return mapped[number];
}

static void open_device(void)
{
	uint8_t space[256];
	uint16_t command;
	char path[512];
	int fd;

	find_device();
	snprintf(path, sizeof(path), "%s/config", device_path);
	fd = open(path, O_RDWR);
	if (fd < 0 || pread(fd, space, sizeof(space), 0) != sizeof(space))
		die("cannot access %s: %s", path, strerror(errno));
	/* Disable the device's interrupt, which has no handler. The program polls the ring. */
	memcpy(&command, space + PCI_COMMAND, sizeof(command));
	command |= PCI_COMMAND_MEMORY | PCI_COMMAND_MASTER | PCI_COMMAND_INTX_DISABLE;
	if (pwrite(fd, &command, sizeof(command), PCI_COMMAND) != sizeof(command))
		die("cannot access %s: %s", path, strerror(errno));
	close(fd);

	int left = 48; /* largest number of capabilities that fit into the configuration space */
	for (uint8_t at = space[PCI_CAPABILITY_LIST]; at && left--; at = space[at + 1]) {
		struct virtio_pci_cap cap;
		volatile uint8_t **region;

		if (space[at] != PCI_CAP_ID_VNDR || at + sizeof(cap) > sizeof(space))
			continue;
		memcpy(&cap, space + at, sizeof(cap));
		if (cap.cfg_type == VIRTIO_PCI_CAP_COMMON_CFG)
			region = &common;
		else if (cap.cfg_type == VIRTIO_PCI_CAP_NOTIFY_CFG)
			region = &notify;
		else if (cap.cfg_type == VIRTIO_PCI_CAP_DEVICE_CFG)
			region = &device;
		else
			continue;
		if (region == &notify)
			memcpy(&notify_multiplier, space + at + sizeof(cap), 4);
		*region = map_bar(cap.bar) + cap.offset;
	}
	if (!common || !notify || !device)
		die("the PCI device lacks virtio capabilities");
}

/* Functions for registers. */

#define FIELD(name) offsetof(struct virtio_pci_common_cfg, name)

static uint8_t get8(size_t at) { return common[at]; }
static uint16_t get16(size_t at) { return *(volatile uint16_t *)(common + at); }
static uint32_t get32(size_t at) { return *(volatile uint32_t *)(common + at); }
static void set8(size_t at, uint8_t value) { common[at] = value; }
static void set16(size_t at, uint16_t value) { *(volatile uint16_t *)(common + at) = value; }
static void set32(size_t at, uint32_t value) { *(volatile uint32_t *)(common + at) = value; }

static void set_address(size_t low, uint64_t value)
{
	set32(low, (uint32_t)value);
	set32(low + 4, (uint32_t)(value >> 32));
}

static struct virtio_tmem_config read_config(void)
{
	struct virtio_tmem_config config;
	uint8_t before;

	/*
	 * Read the configuration again if the device changed it between two of the accesses.
	 */
	do {
		uint32_t words[sizeof(config) / 4];

		before = get8(FIELD(config_generation));
		for (size_t i = 0; i < sizeof(config) / 4; i++)
			words[i] = *(volatile uint32_t *)(device + 4 * i);
		memcpy(&config, words, sizeof(config));
	} while (before != get8(FIELD(config_generation)));
	return config;
}

static void reset(void)
{
	set8(FIELD(device_status), 0);
	for (int i = 0; get8(FIELD(device_status)) != 0; i++) {
		if (i == 5000)
			die("the device did not finish its reset");
		nap_ms(1);
	}
}

static uint64_t offered_features(void)
{
	uint64_t low, high;

	set32(FIELD(device_feature_select), 0);
	low = get32(FIELD(device_feature));
	set32(FIELD(device_feature_select), 1);
	high = get32(FIELD(device_feature));
	return low | high << 32;
}

/* Functions for memory that the device reads and writes. */

static uint64_t random_state;

static uint32_t random_below(uint32_t limit)
{
	/* splitmix64: Steele, Lea, Flood 2014. */
	uint64_t z = random_state += 0x9e3779b97f4a7c15ull;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ z >> 27) * 0x94d049bb133111ebull;
	return (uint32_t)((z ^ z >> 31) % limit);
}

static uint64_t physical(const void *at)
{
	int fd = open("/proc/self/pagemap", O_RDONLY);
	uint64_t entry = 0;

	if (fd < 0 || pread(fd, &entry, 8, (uintptr_t)at / PAGE * 8) != 8 || !(entry >> 63))
		die("cannot read the pagemap entry of %p: %s", at, strerror(errno));
	close(fd);
	return (entry & ((1ull << 55) - 1)) * PAGE;
}

static void setup_queue(struct queue *queue, int number)
{
	uint8_t *pages = mmap(NULL, 6 * PAGE, PROT_READ | PROT_WRITE,
			      MAP_PRIVATE | MAP_ANONYMOUS | MAP_LOCKED | MAP_POPULATE, -1, 0);

	if (pages == MAP_FAILED || madvise(pages, 6 * PAGE, MADV_NOHUGEPAGE))
		die("cannot allocate memory for a queue: %s", strerror(errno));
	memset(pages, 0, 6 * PAGE);
	for (int i = 0; i < 6; i++)
		queue->phys[i] = physical(pages + i * PAGE);
	queue->target = queue->phys[4];
	queue->desc = (void *)pages;
	queue->avail = (void *)(pages + PAGE);
	queue->used = (void *)(pages + 2 * PAGE);
	queue->readable = pages + 3 * PAGE;
	queue->data = pages + 4 * PAGE;
	queue->writable = pages + 5 * PAGE;
	queue->avail->flags = VRING_AVAIL_F_NO_INTERRUPT;
	set16(FIELD(queue_select), number);
	if (get16(FIELD(queue_size)) < RING_SIZE)
		die("queue %d has fewer than %d descriptors", number, RING_SIZE);
	set16(FIELD(queue_size), RING_SIZE);
	set_address(FIELD(queue_desc_lo), queue->phys[0]);
	set_address(FIELD(queue_avail_lo), queue->phys[1]);
	set_address(FIELD(queue_used_lo), queue->phys[2]);
	queue->notify = (void *)(notify + get16(FIELD(queue_notify_off)) * notify_multiplier);
	set16(FIELD(queue_enable), 1);
}

static void start(void)
{
	uint8_t state = VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER;

	write_text("/proc/sys/vm/compact_unevictable_allowed", "0");
	reset();
	set8(FIELD(device_status), state);
	if (!(offered_features() >> VIRTIO_F_VERSION_1 & 1))
		die("the device does not offer VIRTIO_F_VERSION_1");
	set32(FIELD(guest_feature_select), 0);
	set32(FIELD(guest_feature), 0);
	set32(FIELD(guest_feature_select), 1);
	set32(FIELD(guest_feature), 1u << (VIRTIO_F_VERSION_1 - 32));
	state |= VIRTIO_CONFIG_S_FEATURES_OK;
	set8(FIELD(device_status), state);
	if (!(get8(FIELD(device_status)) & VIRTIO_CONFIG_S_FEATURES_OK))
		die("the device did not accept the features");
	setup_queue(&control, VIRTIO_TMEM_CONTROL_QUEUE);
	setup_queue(&request, 1);
	set8(FIELD(device_status), state | VIRTIO_CONFIG_S_DRIVER_OK);
}

/* Functions for requests. */

static uint64_t current_generation(void)
{
	return read_config().generation;
}

static int answered(struct queue *queue)
{
	__sync_synchronize();
	return queue->used->idx == queue->sent;
}

/*
 * Sends the contents of `readable` and `data` and waits for the answer, however long the daemon
 * takes, because the pages belong to the device until then. Returns the status.
 */
static uint8_t submit(struct queue *queue, size_t readable, int data_is_readable,
		      size_t data, size_t writable)
{
	int64_t sent_ms = now_ms();
	int told = 0, used = 0;

	memset(queue->writable, VIRTIO_TMEM_S_UNANSWERED, PAGE);
	queue->desc[used++] = (struct vring_desc){queue->phys[3], readable, 0, 0};
	if (data && data_is_readable)
		queue->desc[used++] = (struct vring_desc){queue->phys[4], data, 0, 0};
	queue->desc[used++] =
		(struct vring_desc){queue->phys[5], writable, VRING_DESC_F_WRITE, 0};
	if (data && !data_is_readable)
		queue->desc[used++] = (struct vring_desc){queue->target, data,
							  VRING_DESC_F_WRITE, 0};
	for (int i = 0; i + 1 < used; i++) {
		queue->desc[i].flags |= VRING_DESC_F_NEXT;
		queue->desc[i].next = i + 1;
	}
	queue->avail->ring[queue->sent % RING_SIZE] = 0;
	__sync_synchronize();
	queue->avail->idx = ++queue->sent;
	__sync_synchronize();
	*queue->notify = queue == &control ? VIRTIO_TMEM_CONTROL_QUEUE : 1;
	while (!answered(queue)) {
		if (!told && now_ms() - sent_ms > UNANSWERED_MS) {
			say("unanswered");
			told = 1;
		}
		if (wanted_end) {
			say("ended unanswered");
			reset();
			exit(0);
		}
		nap_ms(1);
	}
	if (told)
		say("answered");
	for (int i = 0; i < 6; i++)
		if (physical((uint8_t *)queue->desc + i * PAGE) != queue->phys[i])
			die("the kernel moved a page that the device uses");
	if (queue->used->ring[(queue->sent - 1) % RING_SIZE].len <
	    sizeof(struct virtio_tmem_resp))
		return VIRTIO_TMEM_S_UNANSWERED;
	return queue->writable[0];
}

static uint32_t pool;
static uint64_t cookie;

static size_t fill_request(struct queue *queue, uint64_t generation, int type, int count)
{
	struct virtio_tmem_req head = {
		.generation = generation, .type = type, .count = count, .pool = pool};

	memset(queue->readable, 0, PAGE);
	memcpy(queue->readable, &head, sizeof(head));
	return sizeof(head);
}

static void fill_pattern(uint8_t *page, uint64_t seed)
{
	random_state = seed;
	for (int i = 0; i < PAGE; i += 4) {
		uint32_t word = random_below(UINT32_MAX);

		memcpy(page + i, &word, 4);
	}
}

static int store(uint64_t generation)
{
	size_t at = fill_request(&request, generation, VIRTIO_TMEM_T_PUT, 1);
	struct virtio_tmem_put_page page = {
		.object = KEEP_OBJECT, .index = KEEP_INDEX, .cookie = ++cookie};
	uint8_t status;

	memcpy(request.readable + at, &page, sizeof(page));
	fill_pattern(request.data, cookie);
	status = submit(&request, at + sizeof(page), 1, PAGE, sizeof(struct virtio_tmem_resp) + 1);
	if (status == VIRTIO_TMEM_S_STALE)
		return 0;
	if (status != VIRTIO_TMEM_S_OK)
		die("the device answered a put with status %u", status);
	return request.writable[sizeof(struct virtio_tmem_resp)] == VIRTIO_TMEM_P_STORED;
}

static int begin(uint64_t generation)
{
	struct virtio_tmem_pool_create create = {0};
	uint8_t status;
	size_t at;

	pool++;
	at = fill_request(&control, generation, VIRTIO_TMEM_T_POOL_CREATE, 0);
	memcpy(control.readable + at, &create, sizeof(create));
	status = submit(&control, at + sizeof(create), 1, 0, sizeof(struct virtio_tmem_resp));
	if (status == VIRTIO_TMEM_S_STALE)
		return 0;
	if (status != VIRTIO_TMEM_S_OK)
		die("the device answered POOL_CREATE with status %u", status);
	return store(generation);
}

static uint8_t get_page(uint64_t generation)
{
	size_t at = fill_request(&request, generation, VIRTIO_TMEM_T_GET, 1);
	struct virtio_tmem_get get = {.object = KEEP_OBJECT, .index = KEEP_INDEX};

	memcpy(request.readable + at, &get, sizeof(get));
	memcpy(request.readable + at + sizeof(get), &cookie, sizeof(cookie));
	return submit(&request, at + sizeof(get) + sizeof(cookie), 0, PAGE,
		      sizeof(struct virtio_tmem_resp) + sizeof(struct virtio_tmem_get_page));
}

static void get_keep(uint64_t generation)
{
	struct virtio_tmem_get_page result;
	uint8_t expected[PAGE], status;

	memset(request.data, 0xee, PAGE);
	status = get_page(generation);
	if (status == VIRTIO_TMEM_S_STALE) {
		say("keep stale");
		return;
	}
	if (status != VIRTIO_TMEM_S_OK)
		die("the device answered a get with status %u", status);
	memcpy(&result, request.writable + sizeof(struct virtio_tmem_resp), sizeof(result));
	if (result.result == VIRTIO_TMEM_P_MISS) {
		say("keep miss");
		return;
	}
	fill_pattern(expected, cookie);
	if (result.result != VIRTIO_TMEM_P_HIT || result.cookie != cookie ||
	    memcmp(expected, request.data, PAGE)) {
		say("wrong answer to a get: result %u, cookie %llx, expected cookie %llx",
		    result.result, (unsigned long long)result.cookie, (unsigned long long)cookie);
		reset();
		exit(1);
	}
	say("keep hit");
}

/* A page that only the device writes to, after this program has filled it once. */
static uint8_t *held;
static uint64_t held_cookie;

static void prepare_hold(void)
{
	held = mmap(NULL, PAGE, PROT_READ | PROT_WRITE,
		    MAP_PRIVATE | MAP_ANONYMOUS | MAP_LOCKED | MAP_POPULATE, -1, 0);
	if (held == MAP_FAILED)
		die("cannot allocate the held page: %s", strerror(errno));
	memset(held, 0xee, PAGE);
}

/*
 * If no page is held, gets the stored page of `generation` into the buffer `held` and returns true,
 * even if the get fails. If a page is held, verifies its contents, releases it and returns false.
 * Wrong contents end the program with status 1.
 */
static int hold(uint64_t generation)
{
	uint8_t expected[PAGE];

	if (!held_cookie) {
		request.target = physical(held);
		held_cookie = get_page(generation) == VIRTIO_TMEM_S_OK ? cookie : 0;
		request.target = request.phys[4];
		say(held_cookie ? "held" : "not held");
		return 1;
	}
	fill_pattern(expected, held_cookie);
	held_cookie = 0;
	if (memcmp(expected, held, PAGE)) {
		say("the held page has wrong contents: it begins with %02x", held[0]);
		reset();
		exit(1);
	}
	say("held right");
	return 0;
}

static void on_signal(int number)
{
	if (number == SIGUSR1)
		wanted_keep = 1;
	else if (number == SIGUSR2)
		wanted_hold = 1;
	else
		wanted_end = 1;
}

static void run(void)
{
	uint64_t generation = UINT64_MAX;
	int stored = 0;

	signal(SIGUSR1, on_signal);
	signal(SIGUSR2, on_signal);
	prepare_hold();
	signal(SIGTERM, on_signal);
	if (getrandom(&cookie, sizeof(cookie), 0) != sizeof(cookie))
		die("getrandom failed: %s", strerror(errno));
	cookie >>= 1; /* A random cookie could wrap to 0 when it grows, so clear its highest bit. */
	start();
	say("up");
	while (!wanted_end) {
		uint64_t now = current_generation();

		if (now != generation) {
			generation = now;
			stored = 0;
			say("generation 0x%016" PRIx64, generation);
		}
		if (generation && !stored && begin(generation)) {
			stored = 1;
			say("stored");
		}
		if (wanted_keep && stored) {
			wanted_keep = 0;
			get_keep(generation);
			stored = store(generation);
		}
		if (wanted_hold && stored) {
			wanted_hold = 0;
			if (hold(generation))
				stored = store(generation);
		}
		nap_ms(10);
	}
	reset();
	say("ended");
}

int main(void)
{
	open_device();
	run();
	return 0;
}
