/*
 * vhost-user transcendent memory device
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The guest puts copies of page-cache pages that it evicts into a backend on
 * the host and gets them back when it misses them. All it loses with a backend
 * is speed, so this device owns connect, disconnect and reconnect: it starts
 * without a backend, outlives any number of them, and answers the guest from
 * what it has cached.
 *
 * Never:
 * - wait for a backend that has not just shown that it answers: a connection
 *   is probed without blocking before the handshake, which blocks;
 * - ask the backend when the guest reads the configuration or QMP the status;
 * - show a backend memory that a migration has still to bring: it maps the
 *   pages by itself, and would see holes;
 * - let a backend change what the guest sees of the device, generation apart.
 *
 * All of it runs under the big QEMU lock. States, and what changes them:
 *
 *            connection is open,
 *            memory is complete         answered
 *     IDLE ---------------------> PROBING ----> READY
 *      ^ ^                           |          | | ^
 *      | |  closed                   |   closed | | | driver resets,
 *      | +---------------------------+----------+ | | VM pauses
 *      |                                          | |
 *      | bottom half           closed      driver v |
 *      +-------------- LOST <--------------- STARTED
 *
 * The chardev reports a closed connection from inside any vhost call, where
 * the vhost device must stay as it is. So a started device becomes LOST, and
 * the bottom half stops it.
 */

#include "qemu/osdep.h"
#include "qapi/error.h"
#include "qemu/error-report.h"
#include "qemu/host-utils.h"
#include "qemu/units.h"
#include "qapi/qapi-events-virtio.h"
#include "qapi/visitor.h"
#include "chardev/char.h"
#include "hw/boards.h"
#include "hw/mem/memory-device.h"
#include "hw/qdev-properties.h"
#include "hw/qdev-properties-system.h"
#include "hw/virtio/vhost-user-tmem.h"
#include "hw/virtio/virtio-bus.h"
#include "hw/virtio/virtio-mmio.h"
#include "migration/blocker.h"
#include "migration/misc.h"
#include "standard-headers/linux/vhost_types.h"
#include "system/hostmem.h"
#include "system/runstate.h"
#include "trace.h"

/*
 * Pause after a refused connection. A backend that is alive and unfit needs to
 * be looked at by a person. One that kept the VM waiting until the time-out is
 * not let near for so many times as long, so that in all a guest is held up for
 * less than 5 % of the time. After one that died there is no pause to speak of.
 */
#define RETRY_UNFIT_MS 1000
#define RETRY_WAIT_FACTOR 20

/* Between two checks whether an incoming migration has brought all memory. */
#define RETRY_INCOMING_MS 100

/*
 * Feature bits that the device may have, and so must have of its backend. Only
 * LATENCIES is not asked of a backend: an older one answers UNSUPPORTED.
 */
#define TMEM_FEATURES ((1ULL << VIRTIO_F_VERSION_1) | \
                       (1ULL << VIRTIO_F_IN_ORDER) | \
                       (1ULL << VIRTIO_RING_F_INDIRECT_DESC) | \
                       (1ULL << VIRTIO_RING_F_EVENT_IDX) | \
                       (1ULL << VIRTIO_TMEM_F_LATENCIES))

/*
 * Protocol features that the device uses. Others would give the backend a
 * channel for requests of its own, and ways into QEMU that nothing here needs.
 */
#define TMEM_PROTOCOL_FEATURES \
    ((1ULL << VHOST_USER_PROTOCOL_F_MQ) | \
     (1ULL << VHOST_USER_PROTOCOL_F_LOG_SHMFD) | \
     (1ULL << VHOST_USER_PROTOCOL_F_REPLY_ACK) | \
     (1ULL << VHOST_USER_PROTOCOL_F_CONFIG) | \
     (1ULL << VHOST_USER_PROTOCOL_F_RESET_DEVICE) | \
     (1ULL << VHOST_USER_PROTOCOL_F_CONFIGURE_MEM_SLOTS))

/* The vhost-user header, as GET_FEATURES and its answer have it. */
#define PROBE_REQUEST 1
#define PROBE_VERSION 1
#define PROBE_REPLY 4

typedef struct ProbeMessage {
    uint32_t request;
    uint32_t flags;
    uint32_t size;
    uint64_t features;
} QEMU_PACKED ProbeMessage;

QEMU_BUILD_BUG_ON(sizeof(ProbeMessage) != VHOST_USER_TMEM_PROBE_SIZE);
QEMU_BUILD_BUG_ON(sizeof(struct virtio_tmem_config) != 32);

static const struct {
    unsigned int bit;
    const char *name;
} needed_features[] = {
    { VIRTIO_F_VERSION_1, "VIRTIO_F_VERSION_1" },
    { VIRTIO_F_IN_ORDER, "VIRTIO_F_IN_ORDER" },
    { VIRTIO_RING_F_INDIRECT_DESC, "VIRTIO_RING_F_INDIRECT_DESC" },
    { VIRTIO_RING_F_EVENT_IDX, "VIRTIO_RING_F_EVENT_IDX" },
}, needed_protocol_features[] = {
    { VHOST_USER_PROTOCOL_F_MQ, "VHOST_USER_PROTOCOL_F_MQ" },
    { VHOST_USER_PROTOCOL_F_REPLY_ACK, "VHOST_USER_PROTOCOL_F_REPLY_ACK" },
    { VHOST_USER_PROTOCOL_F_CONFIG, "VHOST_USER_PROTOCOL_F_CONFIG" },
    { VHOST_USER_PROTOCOL_F_RESET_DEVICE,
      "VHOST_USER_PROTOCOL_F_RESET_DEVICE" },
};

/* Returns the id that the user gave the device, or NULL. */
static const char *vhost_user_tmem_id(VHostUserTmem *s)
{
    DeviceState *proxy = qdev_get_parent_bus(DEVICE(s))->parent;

    if (DEVICE(s)->id) {
        return DEVICE(s)->id;
    }
    return proxy ? proxy->id : NULL;
}

static const char *vhost_user_tmem_name(VHostUserTmem *s)
{
    const char *id = vhost_user_tmem_id(s);

    return id ? id : s->chardev.chr->label;
}

static unsigned int vhost_user_tmem_num_virtqs(VHostUserTmem *s)
{
    return s->num_queues + 1;
}

uint16_t vhost_user_tmem_num_queues(VHostUserTmem *s)
{
    if (s->num_queues) {
        return s->num_queues;
    }
    return MIN(current_machine->smp.cpus, VHOST_USER_TMEM_AUTO_QUEUES_MAX);
}

/* Generation, state and error, and the interrupt and QMP event of changes */

static void vhost_user_tmem_changed(VHostUserTmem *s)
{
    s->changed = true;
    qemu_bh_schedule(s->bh);
}

static bool vhost_user_tmem_connected(VHostUserTmem *s)
{
    return s->state == VHOST_USER_TMEM_READY ||
           s->state == VHOST_USER_TMEM_STARTED;
}

static void vhost_user_tmem_set_state(VHostUserTmem *s,
                                      VHostUserTmemState state)
{
    s->state = state;
    vhost_user_tmem_changed(s);
}

static void vhost_user_tmem_set_error(VHostUserTmem *s, const char *error)
{
    g_free(s->last_error);
    s->last_error = g_strdup(error);
    vhost_user_tmem_changed(s);
}

static uint64_t vhost_user_tmem_generation(VHostUserTmem *s)
{
    return le64_to_cpu(s->config.generation);
}

/*
 * The interrupt is raised from the bottom half: in set_status DRIVER_OK is not
 * recorded yet and virtio_notify_config() would do nothing. A stopped VM gets
 * it when it continues.
 */
static void vhost_user_tmem_notify(VHostUserTmem *s)
{
    s->notify = true;
    qemu_bh_schedule(s->bh);
}

static void vhost_user_tmem_set_generation(VHostUserTmem *s,
                                           uint64_t generation)
{
    trace_vhost_user_tmem_generation(s, generation);
    s->config.generation = cpu_to_le64(generation);
    /*
     * A driver reads the number in two halves. The interrupt changes the
     * configuration's generation, too, but comes later or not at all.
     */
    VIRTIO_DEVICE(s)->generation++;
    vhost_user_tmem_changed(s);
}

/* Connection */

/* Ends the connection; the rest is done when the chardev reports it closed. */
static void vhost_user_tmem_drop(VHostUserTmem *s)
{
    qemu_chr_fe_disconnect(&s->chardev);
}

static char *vhost_user_tmem_timeout_error(VHostUserTmem *s)
{
    return g_strdup_printf("it did not answer within %u ms",
                           s->backend_timeout_ms);
}

/*
 * Reports why a backend is refused, unless that was reported last: with a
 * chardev that reconnects, the same backend is soon back. @since_ms is when
 * QEMU began to wait for it.
 */
static void vhost_user_tmem_refuse(VHostUserTmem *s, int64_t since_ms,
                                   Error *err)
{
    int64_t now_ms = qemu_clock_get_ms(QEMU_CLOCK_REALTIME);
    int64_t pause_ms = MAX(s->user.closed ? 0 : RETRY_UNFIT_MS,
                           RETRY_WAIT_FACTOR * (now_ms - since_ms));
    g_autofree char *error = s->user.timed_out ?
        vhost_user_tmem_timeout_error(s) : g_strdup(error_get_pretty(err));

    error_free(err);
    s->retry_at_ms = MAX(s->retry_at_ms, now_ms + pause_ms);
    vhost_user_tmem_drop(s);
    vhost_user_tmem_set_error(s, error);
    if (g_strcmp0(s->reported_error, error)) {
        error_report("vhost-user-tmem %s: backend refused: %s",
                     vhost_user_tmem_name(s), error);
        g_free(s->reported_error);
        s->reported_error = g_steal_pointer(&error);
    }
}

static bool vhost_user_tmem_get_config(VHostUserTmem *s,
                                       struct virtio_tmem_config *config,
                                       Error **errp)
{
    if (vhost_dev_get_config(&s->dev, (uint8_t *)config, sizeof(*config),
                             errp) < 0) {
        return false;
    }
    /*
     * The guest was told the limits before there was a backend, so they cannot
     * be lowered to what this one can do.
     */
    if (le32_to_cpu(config->page_size) != VIRTIO_TMEM_PAGE_SIZE ||
        le16_to_cpu(config->batch_max) < VIRTIO_TMEM_BATCH_MAX ||
        le32_to_cpu(config->pools_max) < VIRTIO_TMEM_POOLS_MAX) {
        error_setg(errp, "its page_size %u, batch_max %u, pools_max %u are "
                   "less than the %u, %u, %u that the guest was told",
                   le32_to_cpu(config->page_size),
                   le16_to_cpu(config->batch_max),
                   le32_to_cpu(config->pools_max), VIRTIO_TMEM_PAGE_SIZE,
                   VIRTIO_TMEM_BATCH_MAX, VIRTIO_TMEM_POOLS_MAX);
        return false;
    }
    return true;
}

/* Whether the backend can map all of a part of a ring. */
static bool vhost_user_tmem_is_mapped(VHostUserTmem *s, hwaddr address,
                                      hwaddr size)
{
    int i;

    for (i = 0; i < s->dev.mem->nregions; i++) {
        struct vhost_memory_region *region = &s->dev.mem->regions[i];

        if (address >= region->guest_phys_addr &&
            size <= region->memory_size &&
            address - region->guest_phys_addr <= region->memory_size - size) {
            return true;
        }
    }
    return false;
}

/* Returns a queue that the driver did not put into memory, or -1. */
static int vhost_user_tmem_find_faulty_queue(VHostUserTmem *s)
{
    VirtIODevice *vdev = VIRTIO_DEVICE(s);
    int i;

    for (i = 0; i < s->dev.nvqs; i++) {
        if (virtio_queue_get_desc_addr(vdev, i) &&
            (!vhost_user_tmem_is_mapped(s, virtio_queue_get_desc_addr(vdev, i),
                                        virtio_queue_get_desc_size(vdev, i)) ||
             !vhost_user_tmem_is_mapped(s, virtio_queue_get_avail_addr(vdev, i),
                                        virtio_queue_get_avail_size(vdev, i)) ||
             !vhost_user_tmem_is_mapped(s, virtio_queue_get_used_addr(vdev, i),
                                        virtio_queue_get_used_size(vdev, i)))) {
            return i;
        }
    }
    return -1;
}

static bool vhost_user_tmem_start(VHostUserTmem *s, Error **errp)
{
    VirtIODevice *vdev = VIRTIO_DEVICE(s);
    BusState *qbus = BUS(qdev_get_parent_bus(DEVICE(vdev)));
    VirtioBusClass *k = VIRTIO_BUS_GET_CLASS(qbus);
    struct virtio_tmem_config config;
    int i, ret;

    if (!k->set_guest_notifiers) {
        error_setg(errp, "binding does not support guest notifiers");
        return false;
    }

    ret = vhost_dev_enable_notifiers(&s->dev, vdev);
    if (ret < 0) {
        error_setg_errno(errp, -ret, "cannot enable host notifiers");
        return false;
    }

    ret = k->set_guest_notifiers(qbus->parent, s->dev.nvqs, true);
    if (ret < 0) {
        error_setg_errno(errp, -ret, "cannot bind guest notifiers");
        goto err_host_notifiers;
    }

    /* The driver may have accepted LATENCIES, which the backend may lack. */
    s->dev.acked_features = vdev->guest_features & s->dev.features;

    /* There is no guest_notifier_mask: virtio-pci does without. */
    for (i = 0; i < s->dev.nvqs; i++) {
        vhost_virtqueue_mask(&s->dev, vdev, i, false);
        /* An error of an earlier start is none of this one. */
        event_notifier_test_and_clear(&s->vhost_vqs[i].error_notifier);
    }

    ret = vhost_dev_start(&s->dev, vdev, true);
    if (ret < 0) {
        error_setg_errno(errp, -ret, "cannot start it");
        /* vhost_dev_start() leaves this one behind when it fails late. */
        event_notifier_cleanup(
            &s->vhost_vqs[VHOST_QUEUE_NUM_CONFIG_INR].masked_config_notifier);
        goto err_guest_notifiers;
    }
    if (s->state != VHOST_USER_TMEM_READY) {
        vhost_user_tmem_set_state(s, VHOST_USER_TMEM_LOST);
        error_setg(errp, "it closed the connection");
        return false;
    }
    vhost_user_tmem_set_state(s, VHOST_USER_TMEM_STARTED);

    /*
     * Read again at each start: it is another number after a reset and the
     * same after a pause. The disconnect that follows a failure stops.
     */
    if (!vhost_user_tmem_get_config(s, &config, errp)) {
        return false;
    }
    if (!config.generation) {
        error_setg(errp, "it is started and has no generation");
        return false;
    }
    vhost_user_tmem_set_generation(s, le64_to_cpu(config.generation));
    vhost_user_tmem_set_error(s, NULL);
    g_clear_pointer(&s->reported_error, g_free);
    trace_vhost_user_tmem_start(s, s->dev.nvqs);
    return true;

err_guest_notifiers:
    k->set_guest_notifiers(qbus->parent, s->dev.nvqs, false);
err_host_notifiers:
    vhost_dev_disable_notifiers(&s->dev, vdev);
    return false;
}

/* The generation stays: this is also how a VM pauses. */
static void vhost_user_tmem_stop(VHostUserTmem *s)
{
    VirtIODevice *vdev = VIRTIO_DEVICE(s);
    BusState *qbus = BUS(qdev_get_parent_bus(DEVICE(vdev)));
    VirtioBusClass *k = VIRTIO_BUS_GET_CLASS(qbus);
    int ret;

    trace_vhost_user_tmem_stop(s);
    vhost_user_tmem_set_state(s, s->state == VHOST_USER_TMEM_LOST ?
                                 VHOST_USER_TMEM_IDLE : VHOST_USER_TMEM_READY);
    vhost_dev_stop(&s->dev, vdev, true);

    ret = k->set_guest_notifiers(qbus->parent, s->dev.nvqs, false);
    if (ret < 0) {
        error_report("vhost-user-tmem %s: guest notifier cleanup failed: %s",
                     vhost_user_tmem_name(s), strerror(-ret));
    }
    vhost_dev_disable_notifiers(&s->dev, vdev);
}

static bool vhost_user_tmem_is_started(VHostUserTmem *s)
{
    return s->state == VHOST_USER_TMEM_STARTED ||
           s->state == VHOST_USER_TMEM_LOST;
}

static void vhost_user_tmem_update(VHostUserTmem *s)
{
    int64_t since_ms = qemu_clock_get_ms(QEMU_CLOCK_REALTIME);
    Error *err = NULL;

    if (s->running && s->state == VHOST_USER_TMEM_READY) {
        s->faulty_queue = vhost_user_tmem_find_faulty_queue(s);
        if (s->faulty_queue >= 0) {
            /* The status register is being written: NEEDS_RESET has to wait. */
            s->running = false;
            qemu_bh_schedule(s->bh);
            return;
        }
        if (!vhost_user_tmem_start(s, &err)) {
            vhost_user_tmem_refuse(s, since_ms, err);
        }
        vhost_user_tmem_notify(s);
    } else if (!s->running && vhost_user_tmem_is_started(s)) {
        vhost_user_tmem_stop(s);
    }
}

/* The backend has stopped a queue: nothing but a reset starts it again. */
static void vhost_user_tmem_queue_error(EventNotifier *n)
{
    struct vhost_virtqueue *vq = container_of(n, struct vhost_virtqueue,
                                              error_notifier);
    VHostUserTmem *s = container_of(vq->dev, VHostUserTmem, dev);
    g_autofree char *error = g_strdup_printf(
        "it stopped queue %d after an error, see its log",
        (int)(vq - s->vhost_vqs));

    if (!event_notifier_test_and_clear(n) ||
        s->state != VHOST_USER_TMEM_STARTED) {
        return;
    }
    s->running = false;
    vhost_user_tmem_update(s);
    /* For drivers that do not look at the status. */
    vhost_user_tmem_set_generation(s, 0);
    vhost_user_tmem_set_error(s, error);
    virtio_error(VIRTIO_DEVICE(s), "vhost-user-tmem %s: the device needs a "
                 "reset because of its backend: %s", vhost_user_tmem_name(s),
                 error);
}

/* Whether the backend can be what the guest was told that the device is. */
static bool vhost_user_tmem_check(VHostUserTmem *s, Error **errp)
{
    VirtIODevice *vdev = VIRTIO_DEVICE(s);
    struct virtio_tmem_config config;
    unsigned int i;

    for (i = 0; i < ARRAY_SIZE(needed_features); i++) {
        if (virtio_has_feature(vdev->host_features, needed_features[i].bit) &&
            !virtio_has_feature(s->dev.features, needed_features[i].bit)) {
            error_setg(errp, "it lacks the feature %s",
                       needed_features[i].name);
            return false;
        }
    }
    for (i = 0; i < ARRAY_SIZE(needed_protocol_features); i++) {
        if (!virtio_has_feature(s->dev.protocol_features,
                                needed_protocol_features[i].bit)) {
            error_setg(errp, "it lacks the protocol feature %s",
                       needed_protocol_features[i].name);
            return false;
        }
    }
    return vhost_user_tmem_get_config(s, &config, errp);
}

static void vhost_user_tmem_connect(VHostUserTmem *s)
{
    int64_t since_ms = qemu_clock_get_ms(QEMU_CLOCK_REALTIME);
    Error *err = NULL;
    int i;

    if (s->dev.vhost_ops) {
        vhost_dev_cleanup(&s->dev);
    }
    s->user.closed = false;
    s->user.memory_slots = 0;
    s->state = VHOST_USER_TMEM_READY;

    s->dev.vqs = s->vhost_vqs;
    s->dev.nvqs = vhost_user_tmem_num_virtqs(s);
    s->dev.num_queues = s->dev.nvqs;
    s->dev.vq_index = 0;
    s->dev.vq_index_end = s->dev.nvqs;

    if (vhost_dev_init(&s->dev, &s->user, VHOST_BACKEND_TYPE_USER, 0,
                       &err) < 0) {
        /* vhost_dev_init() has cleaned up. */
        vhost_user_tmem_refuse(s, since_ms, err);
        return;
    }
    for (i = 0; i < s->dev.nvqs; i++) {
        event_notifier_set_handler(&s->vhost_vqs[i].error_notifier,
                                   vhost_user_tmem_queue_error);
    }
    if (!vhost_user_tmem_check(s, &err)) {
        vhost_user_tmem_refuse(s, since_ms, err);
        return;
    }
    trace_vhost_user_tmem_connect(s);
    vhost_user_tmem_changed(s);
    vhost_user_tmem_update(s);
}

/* Probe */

static void vhost_user_tmem_event(void *opaque, QEMUChrEvent event);

static int vhost_user_tmem_can_read(void *opaque)
{
    VHostUserTmem *s = opaque;

    return sizeof(s->probe_reply) - s->probe_len;
}

static void vhost_user_tmem_read(void *opaque, const uint8_t *buf, int size)
{
    VHostUserTmem *s = opaque;

    assert(size <= vhost_user_tmem_can_read(s));
    memcpy(s->probe_reply + s->probe_len, buf, size);
    s->probe_len += size;
    if (s->probe_len == sizeof(s->probe_reply)) {
        qemu_bh_schedule(s->bh);
    }
}

/*
 * A stopped or overloaded process still accepts connections, and the handshake
 * waits for answers under the big QEMU lock. So the first question is asked
 * here, where nobody waits: a backend that never answers costs the guest
 * nothing.
 */
static void vhost_user_tmem_probe(VHostUserTmem *s)
{
    ProbeMessage msg = {
        .request = PROBE_REQUEST,
        .flags = PROBE_VERSION,
    };
    const int size = offsetof(ProbeMessage, features);

    s->user.timed_out = false;
    s->state = VHOST_USER_TMEM_PROBING;
    s->probe_len = 0;
    qemu_chr_fe_set_handlers_full(&s->chardev, vhost_user_tmem_can_read,
                                  vhost_user_tmem_read, vhost_user_tmem_event,
                                  NULL, s, NULL, true, false);
    if (qemu_chr_fe_write(&s->chardev, (uint8_t *)&msg, size) != size) {
        vhost_user_tmem_drop(s);
    }
}

static void vhost_user_tmem_probe_done(VHostUserTmem *s)
{
    ProbeMessage msg;
    Error *err = NULL;

    qemu_chr_fe_set_handlers_full(&s->chardev, NULL, NULL,
                                  vhost_user_tmem_event, NULL, s, NULL, true,
                                  false);
    memcpy(&msg, s->probe_reply, sizeof(msg));
    if (msg.request != PROBE_REQUEST ||
        msg.flags != (PROBE_VERSION | PROBE_REPLY) ||
        msg.size != sizeof(msg.features)) {
        error_setg(&err, "it does not speak vhost-user");
        vhost_user_tmem_refuse(s, qemu_clock_get_ms(QEMU_CLOCK_REALTIME), err);
        return;
    }
    vhost_user_tmem_connect(s);
}

/*
 * A backend maps memory by itself: it would see holes where an incoming
 * migration has still to bring pages, before or after the guest begins to run.
 */
static bool vhost_user_tmem_memory_is_incoming(void)
{
    return runstate_check(RUN_STATE_INMIGRATE) ||
           migration_in_incoming_postcopy();
}

/* Continues with a connection that is open and was not asked yet. */
static void vhost_user_tmem_begin(VHostUserTmem *s)
{
    int64_t now_ms = qemu_clock_get_ms(QEMU_CLOCK_REALTIME);

    if (vhost_user_tmem_memory_is_incoming()) {
        timer_mod(s->retry_timer, now_ms + RETRY_INCOMING_MS);
    } else if (now_ms < s->retry_at_ms) {
        timer_mod(s->retry_timer, s->retry_at_ms);
    } else {
        vhost_user_tmem_probe(s);
    }
}

static void vhost_user_tmem_send_event(VHostUserTmem *s)
{
    g_autofree char *path = object_get_canonical_path(OBJECT(s));
    g_autofree char *event = g_strdup_printf(
        "%d %" PRIx64 " %s", vhost_user_tmem_connected(s),
        vhost_user_tmem_generation(s), s->last_error ?: "");

    /* A backend that is refused again and again changes nothing. */
    if (!g_strcmp0(event, s->last_event)) {
        return;
    }
    g_free(s->last_event);
    s->last_event = g_steal_pointer(&event);
    qapi_event_send_vhost_user_tmem_changed(vhost_user_tmem_id(s), path,
                                            vhost_user_tmem_connected(s),
                                            vhost_user_tmem_generation(s),
                                            s->last_error);
}

static void vhost_user_tmem_bh(void *opaque)
{
    VHostUserTmem *s = opaque;
    VirtIODevice *vdev = VIRTIO_DEVICE(s);

    if (s->state == VHOST_USER_TMEM_LOST) {
        vhost_user_tmem_stop(s);
    }
    if (s->state == VHOST_USER_TMEM_IDLE) {
        /* A backend that cannot log is in the way only while connected. */
        migrate_del_blocker(&s->dev.migration_blocker);
        if (qemu_chr_fe_backend_open(&s->chardev)) {
            vhost_user_tmem_begin(s);
        }
    } else if (s->state == VHOST_USER_TMEM_PROBING &&
               s->probe_len == sizeof(s->probe_reply)) {
        vhost_user_tmem_probe_done(s);
    }
    if (s->faulty_queue >= 0) {
        virtio_error(vdev, "vhost-user-tmem %s: the driver put queue %d "
                     "outside of memory", vhost_user_tmem_name(s),
                     s->faulty_queue);
        s->faulty_queue = -1;
    }
    if (s->notify && s->running) {
        s->notify = false;
        virtio_notify_config(vdev);
    }
    if (s->changed) {
        s->changed = false;
        vhost_user_tmem_send_event(s);
    }
}

static void vhost_user_tmem_closed(VHostUserTmem *s)
{
    trace_vhost_user_tmem_disconnect(s);
    s->user.closed = true;
    if (s->user.timed_out) {
        g_autofree char *error = vhost_user_tmem_timeout_error(s);

        vhost_user_tmem_set_error(s, error);
        s->retry_at_ms = qemu_clock_get_ms(QEMU_CLOCK_REALTIME) +
                         (int64_t)RETRY_WAIT_FACTOR * s->backend_timeout_ms;
    } else if (vhost_user_tmem_connected(s) || !s->reported_error) {
        vhost_user_tmem_set_error(s, "it closed the connection");
    }
    vhost_user_tmem_set_state(s, vhost_user_tmem_is_started(s) ?
                                 VHOST_USER_TMEM_LOST : VHOST_USER_TMEM_IDLE);
    /*
     * Tells the migration code not to make the failure its own. Once that
     * reads the dirty log it has to go on: what the backend wrote last is
     * read when the device is stopped, and of a started device only.
     */
    if (!s->dev.log_enabled) {
        s->dev.started = false;
    }
    if (vhost_user_tmem_generation(s)) {
        /* When QEMU ends it closes its chardevs, and nobody lost anything. */
        if (!runstate_check(RUN_STATE_SHUTDOWN)) {
            warn_report("vhost-user-tmem %s: lost its backend: %s; "
                        "the guest runs on without",
                        vhost_user_tmem_name(s), s->last_error);
        }
        vhost_user_tmem_set_generation(s, 0);
        s->notify = true;
    }
}

/*
 * May come from inside any vhost call, in any thread that holds the big lock,
 * so it only records, and leaves the work to the bottom half.
 */
static void vhost_user_tmem_event(void *opaque, QEMUChrEvent event)
{
    VHostUserTmem *s = opaque;

    switch (event) {
    case CHR_EVENT_OPENED:
        qemu_bh_schedule(s->bh);
        break;
    case CHR_EVENT_CLOSED:
        vhost_user_tmem_closed(s);
        break;
    case CHR_EVENT_BREAK:
    case CHR_EVENT_MUX_IN:
    case CHR_EVENT_MUX_OUT:
        /* Ignore */
        break;
    }
}

/* virtio */

static void vhost_user_tmem_read_config(VirtIODevice *vdev, uint8_t *config)
{
    VHostUserTmem *s = VHOST_USER_TMEM(vdev);

    memcpy(config, &s->config, sizeof(s->config));
}

static uint64_t vhost_user_tmem_get_features(VirtIODevice *vdev,
                                             uint64_t features, Error **errp)
{
    /* Of the properties alone: a backend that lacks one is refused. */
    virtio_add_feature(&features, VIRTIO_F_VERSION_1);
    return features & TMEM_FEATURES;
}

/*
 * From 10.0.13 on until 11.1 every queue has the largest size there is when it
 * is added and after a reset. So what the property says is set when the driver
 * first shows itself; it can look at queues only after that.
 */
static void vhost_user_tmem_set_queue_sizes(VHostUserTmem *s)
{
    unsigned int i;

    for (i = 0; i < vhost_user_tmem_num_virtqs(s); i++) {
        virtio_queue_set_num(VIRTIO_DEVICE(s), i, s->queue_size);
        /* A driver that set addresses before has caches of another size. */
        virtio_init_region_cache(VIRTIO_DEVICE(s), i);
    }
}

static void vhost_user_tmem_set_status(VirtIODevice *vdev, uint8_t status)
{
    VHostUserTmem *s = VHOST_USER_TMEM(vdev);
    bool running = virtio_device_should_start(vdev, status) && !vdev->broken &&
                   s->faulty_queue < 0;

    if (status && !(status & VIRTIO_CONFIG_S_FEATURES_OK)) {
        vhost_user_tmem_set_queue_sizes(s);
    }
    if (running && !s->running) {
        /* What a restored guest believes may be wrong, backend or none. */
        vhost_user_tmem_notify(s);
    }
    s->running = running;
    vhost_user_tmem_update(s);
}

/* RESET_DEVICE is sent before this, by virtio_reset(). */
static void vhost_user_tmem_reset(VirtIODevice *vdev)
{
    VHostUserTmem *s = VHOST_USER_TMEM(vdev);

    if (vhost_user_tmem_generation(s)) {
        vhost_user_tmem_set_generation(s, 0);
    }
    s->notify = false;
    s->faulty_queue = -1;
}

static struct vhost_dev *vhost_user_tmem_get_vhost(VirtIODevice *vdev)
{
    VHostUserTmem *s = VHOST_USER_TMEM(vdev);

    return s->state == VHOST_USER_TMEM_READY || vdev->vhost_started ? &s->dev :
                                                                      NULL;
}

/*
 * Requests come in by themselves when the backend starts, as each start kicks
 * every queue; without a backend they have to wait.
 */
static void vhost_user_tmem_handle_output(VirtIODevice *vdev, VirtQueue *vq)
{
}

/* Device */

static bool vhost_user_tmem_ram_is_shared(MemoryRegion *mr)
{
    MemoryRegion *sub;

    if (memory_region_is_ram(mr)) {
        return memory_region_get_fd(mr) >= 0 &&
               qemu_ram_is_shared(mr->ram_block);
    }
    /* With NUMA nodes the RAM is a container of their backends. */
    QTAILQ_FOREACH(sub, &mr->subregions, subregions_link) {
        if (!vhost_user_tmem_ram_is_shared(sub)) {
            return false;
        }
    }
    return true;
}

/* Memory devices whose backend is a container of aliases name it themselves. */
static bool vhost_user_tmem_check_memory_device(Object *device, Error **errp)
{
    HostMemoryBackend *backend = (HostMemoryBackend *)
        object_dynamic_cast(object_property_get_link(device, "memdev", NULL),
                            TYPE_MEMORY_BACKEND);

    if (backend && !vhost_user_tmem_ram_is_shared(
            host_memory_backend_get_memory(backend))) {
        error_setg(errp, "memory backend '%s' is not shared, so the backend of "
                   "vhost-user-tmem cannot map it",
                   object_get_canonical_path_component(OBJECT(backend)));
        error_append_hint(errp, "Create it with -object memory-backend-memfd,"
                          "share=on\n");
        return false;
    }
    return true;
}

static int vhost_user_tmem_pre_plug(NotifierWithReturn *notifier, void *data,
                                    Error **errp)
{
    return vhost_user_tmem_check_memory_device(OBJECT(data), errp) ? 0 :
                                                                     -EINVAL;
}

static int vhost_user_tmem_check_child(Object *child, void *opaque)
{
    return object_dynamic_cast(child, TYPE_MEMORY_DEVICE) &&
           DEVICE(child)->realized &&
           !vhost_user_tmem_check_memory_device(child, opaque);
}

/*
 * A background snapshot write-protects QEMU's mapping of the guest's memory,
 * and would not see what the backend writes through its own.
 */
static int vhost_user_tmem_migration(NotifierWithReturn *notifier,
                                     MigrationEvent *event, Error **errp)
{
    VHostUserTmem *s = container_of(notifier, VHostUserTmem,
                                    migration_notifier);

    if (event->type == MIG_EVENT_PRECOPY_SETUP &&
        migrate_background_snapshot()) {
        error_setg(errp, "vhost-user-tmem %s does not support background "
                   "snapshots: they would miss what its backend writes",
                   vhost_user_tmem_name(s));
        return -ENOTSUP;
    }
    return 0;
}

static bool vhost_user_tmem_check_machine(VHostUserTmem *s, Error **errp)
{
    VirtIODevice *vdev = VIRTIO_DEVICE(s);
    Object *mmio = object_dynamic_cast(
        OBJECT(qdev_get_parent_bus(DEVICE(s))->parent), TYPE_VIRTIO_MMIO);

    if (mmio && VIRTIO_MMIO(mmio)->legacy) {
        error_setg(errp, "vhost-user-tmem is not a legacy device: start QEMU "
                   "with -global virtio-mmio.force-legacy=false");
        return false;
    }
    if (current_machine->cgs) {
        error_setg(errp, "vhost-user-tmem cannot be used in a guest with "
                   "encrypted memory: the backend must read its pages");
        return false;
    }
    if (virtio_host_has_feature(vdev, VIRTIO_F_IOMMU_PLATFORM)) {
        error_setg(errp, "vhost-user-tmem does not support "
                   "iommu_platform=on: the backend takes guest physical "
                   "addresses");
        return false;
    }
    if (virtio_host_has_feature(vdev, VIRTIO_F_RING_PACKED)) {
        error_setg(errp, "vhost-user-tmem does not support packed=on: "
                   "a lost backend is replaced by the split ring's index");
        return false;
    }
    if (current_machine->ram &&
        !vhost_user_tmem_ram_is_shared(current_machine->ram)) {
        error_setg(errp, "vhost-user-tmem needs guest memory that its backend "
                   "can map");
        error_append_hint(errp, "Start QEMU with -object "
                          "memory-backend-memfd,id=mem,size=%" PRIu64 "M,"
                          "share=on -machine memory-backend=mem\n",
                          current_machine->ram_size / MiB);
        return false;
    }
    return object_child_foreach_recursive(OBJECT(current_machine),
                                          vhost_user_tmem_check_child,
                                          errp) == 0;
}

static bool vhost_user_tmem_check_properties(VHostUserTmem *s, Error **errp)
{
    if (!s->chardev.chr) {
        error_setg(errp, "vhost-user-tmem needs chardev=ID of a socket "
                   "chardev");
        return false;
    }
    if (!qemu_chr_has_feature(s->chardev.chr, QEMU_CHAR_FEATURE_FD_PASS)) {
        error_setg(errp, "vhost-user-tmem: chardev '%s' is not a Unix socket, "
                   "so it cannot pass guest memory to the backend",
                   s->chardev.chr->label);
        return false;
    }
    if (s->num_queues > VIRTIO_TMEM_REQUEST_QUEUES_MAX) {
        error_setg(errp, "vhost-user-tmem: num-queues=%u is more than %d",
                   s->num_queues, VIRTIO_TMEM_REQUEST_QUEUES_MAX);
        return false;
    }
    if (s->queue_size < 2 || s->queue_size > VIRTIO_TMEM_QUEUE_SIZE_MAX ||
        !is_power_of_2(s->queue_size)) {
        error_setg(errp, "vhost-user-tmem: queue-size=%u is not a power of 2 "
                   "from 2 to %d", s->queue_size, VIRTIO_TMEM_QUEUE_SIZE_MAX);
        return false;
    }
    if (!s->backend_timeout_ms) {
        error_setg(errp, "vhost-user-tmem: backend-timeout-ms must be more "
                   "than 0, or a hung backend hangs the VM");
        return false;
    }
    return true;
}

static void vhost_user_tmem_realize(DeviceState *dev, Error **errp)
{
    VirtIODevice *vdev = VIRTIO_DEVICE(dev);
    VHostUserTmem *s = VHOST_USER_TMEM(dev);
    unsigned int i, nvqs;

    if (!vhost_user_tmem_check_properties(s, errp) ||
        !vhost_user_tmem_check_machine(s, errp)) {
        return;
    }

    s->num_queues = vhost_user_tmem_num_queues(s);
    nvqs = vhost_user_tmem_num_virtqs(s);

    if (!vhost_user_init(&s->user, &s->chardev, errp)) {
        return;
    }
    vhost_user_set_timeout(&s->user, s->backend_timeout_ms);
    s->user.supports_config = true;
    s->user.protocol_features = TMEM_PROTOCOL_FEATURES;
    s->user.closed = true;
    s->faulty_queue = -1;
    s->last_error = g_strdup("no backend has connected yet");

    virtio_init(vdev, VIRTIO_ID_TMEM, sizeof(s->config));
    s->config = (struct virtio_tmem_config) {
        .page_size = cpu_to_le32(VIRTIO_TMEM_PAGE_SIZE),
        .num_request_queues = cpu_to_le16(s->num_queues),
        .batch_max = cpu_to_le16(VIRTIO_TMEM_BATCH_MAX),
        .pools_max = cpu_to_le32(VIRTIO_TMEM_POOLS_MAX),
    };

    s->vhost_vqs = g_new0(struct vhost_virtqueue, nvqs);
    s->virtqs = g_new(VirtQueue *, nvqs);
    for (i = 0; i < nvqs; i++) {
        s->virtqs[i] = virtio_add_queue(vdev, s->queue_size,
                                        vhost_user_tmem_handle_output);
    }

    s->bh = qemu_bh_new_guarded(vhost_user_tmem_bh, s,
                                &dev->mem_reentrancy_guard);
    s->retry_timer = timer_new_ms(QEMU_CLOCK_REALTIME, vhost_user_tmem_bh, s);

    s->memory_notifier.notify = vhost_user_tmem_pre_plug;
    memory_device_add_pre_plug_notifier(&s->memory_notifier);
    migration_add_notifier(&s->migration_notifier, vhost_user_tmem_migration);

    /* Connects now if there is a connection, else as soon as there is. */
    qemu_chr_fe_set_handlers(&s->chardev, NULL, NULL, vhost_user_tmem_event,
                             NULL, s, NULL, true);
}

static void vhost_user_tmem_unrealize(DeviceState *dev)
{
    VirtIODevice *vdev = VIRTIO_DEVICE(dev);
    VHostUserTmem *s = VHOST_USER_TMEM(dev);
    unsigned int i;

    virtio_set_status(vdev, 0);
    qemu_chr_fe_set_handlers(&s->chardev, NULL, NULL, NULL, NULL, NULL, NULL,
                             false);
    if (s->dev.vhost_ops) {
        vhost_dev_cleanup(&s->dev);
    }
    migration_remove_notifier(&s->migration_notifier);
    notifier_with_return_remove(&s->memory_notifier);
    qemu_bh_delete(s->bh);
    timer_free(s->retry_timer);

    /* The backend unmaps the guest's memory when its connection ends. */
    vhost_user_tmem_drop(s);
    vhost_user_cleanup(&s->user);

    for (i = 0; i < vhost_user_tmem_num_virtqs(s); i++) {
        virtio_delete_queue(s->virtqs[i]);
    }
    g_free(s->virtqs);
    g_free(s->vhost_vqs);
    g_clear_pointer(&s->last_error, g_free);
    g_clear_pointer(&s->reported_error, g_free);
    g_clear_pointer(&s->last_event, g_free);
    virtio_cleanup(vdev);
}

/* virtio_save() writes the configuration that the guest read last. */
static int vhost_user_tmem_pre_save(void *opaque)
{
    VirtIODevice *vdev = VIRTIO_DEVICE(opaque);

    memset(vdev->config + offsetof(struct virtio_tmem_config, generation), 0,
           sizeof_field(struct virtio_tmem_config, generation));
    return 0;
}

/*
 * No state of the backend: what it holds is a cache. Only what the guest was
 * told and the destination cannot change.
 */
static const VMStateDescription vmstate_vhost_user_tmem = {
    .name = "vhost-user-tmem",
    .minimum_version_id = 1,
    .version_id = 1,
    .pre_save = vhost_user_tmem_pre_save,
    .fields = (const VMStateField[]) {
        VMSTATE_UINT16_EQUAL(num_queues, VHostUserTmem,
                             "num-queues of vhost-user-tmem must be equal at "
                             "both ends; without it the number of CPUs counts"),
        VMSTATE_UINT16_EQUAL(queue_size, VHostUserTmem,
                             "queue-size of vhost-user-tmem must be equal at "
                             "both ends"),
        VMSTATE_VIRTIO_DEVICE,
        VMSTATE_END_OF_LIST()
    },
};

static const Property vhost_user_tmem_properties[] = {
    DEFINE_PROP_CHR("chardev", VHostUserTmem, chardev),
    DEFINE_PROP_UINT16("num-queues", VHostUserTmem, num_queues, 0),
    DEFINE_PROP_UINT16("queue-size", VHostUserTmem, queue_size, 256),
    DEFINE_PROP_UINT32("backend-timeout-ms", VHostUserTmem,
                       backend_timeout_ms, 1000),
    DEFINE_PROP_BIT64("latencies", VHostUserTmem, parent_obj.host_features,
                      VIRTIO_TMEM_F_LATENCIES, true),
};

/* Of QOM, for management software. */

static bool vhost_user_tmem_prop_connected(Object *obj, Error **errp)
{
    return vhost_user_tmem_connected(VHOST_USER_TMEM(obj));
}

static void vhost_user_tmem_prop_generation(Object *obj, Visitor *v,
                                            const char *name, void *opaque,
                                            Error **errp)
{
    uint64_t generation = vhost_user_tmem_generation(VHOST_USER_TMEM(obj));

    visit_type_uint64(v, name, &generation, errp);
}

static char *vhost_user_tmem_prop_last_error(Object *obj, Error **errp)
{
    VHostUserTmem *s = VHOST_USER_TMEM(obj);

    return g_strdup(s->last_error ? s->last_error : "");
}

static void vhost_user_tmem_class_init(ObjectClass *klass, void *data)
{
    DeviceClass *dc = DEVICE_CLASS(klass);
    VirtioDeviceClass *vdc = VIRTIO_DEVICE_CLASS(klass);

    device_class_set_props(dc, vhost_user_tmem_properties);
    object_class_property_add_bool(klass, "connected",
                                   vhost_user_tmem_prop_connected, NULL);
    object_class_property_add(klass, "generation", "uint64",
                              vhost_user_tmem_prop_generation, NULL, NULL,
                              NULL);
    object_class_property_add_str(klass, "last-error",
                                  vhost_user_tmem_prop_last_error, NULL);
    dc->vmsd = &vmstate_vhost_user_tmem;
    set_bit(DEVICE_CATEGORY_MISC, dc->categories);
    vdc->realize = vhost_user_tmem_realize;
    vdc->unrealize = vhost_user_tmem_unrealize;
    vdc->get_config = vhost_user_tmem_read_config;
    vdc->get_features = vhost_user_tmem_get_features;
    vdc->set_status = vhost_user_tmem_set_status;
    vdc->reset = vhost_user_tmem_reset;
    vdc->get_vhost = vhost_user_tmem_get_vhost;
}

static const TypeInfo vhost_user_tmem_info = {
    .name = TYPE_VHOST_USER_TMEM,
    .parent = TYPE_VIRTIO_DEVICE,
    .instance_size = sizeof(VHostUserTmem),
    .class_init = vhost_user_tmem_class_init,
};

static void vhost_user_tmem_register_types(void)
{
    type_register_static(&vhost_user_tmem_info);
}

type_init(vhost_user_tmem_register_types)
