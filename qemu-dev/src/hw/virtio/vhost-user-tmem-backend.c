/*
 * vhost-user transcendent memory device: the connection to a backend
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The device owns connect, disconnect and reconnect. It never:
 * - waits for a backend that has not just answered: QEMU probes a connection
 *   without blocking before the handshake, which blocks;
 * - queries the backend when the guest reads the configuration or QMP reads the
 *   status;
 * - shows a backend memory that an incoming migration has not filled yet: the
 *   backend maps the pages by itself, and would see holes;
 * - lets a backend change what the guest sees of the device, except for the
 *   generation.
 *
 * All code runs under the big QEMU lock. The states and their transitions:
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
#include "chardev/char.h"
#include "hw/virtio/vhost-user-tmem.h"
#include "hw/virtio/virtio-bus.h"
#include "migration/blocker.h"
#include "standard-headers/linux/vhost_types.h"
#include "system/runstate.h"
#include "trace.h"

/*
 * Pause after a refused connection. A backend that is alive and unfit needs an
 * administrator, so there is no hurry. After a backend that kept the VM
 * waiting, the pause is RETRY_WAIT_FACTOR times as long as the wait. So the
 * guest waits for less than 5 % of the time. There is no pause after a backend
 * that died.
 */
#define RETRY_UNFIT_MS 1000
#define RETRY_WAIT_FACTOR 20

/* Interval of checks whether an incoming migration has brought all memory. */
#define RETRY_INCOMING_MS 100

/*
 * Protocol features that the device uses. Others would give the backend a
 * channel for its own requests to QEMU, which the device does not need.
 */
#define TMEM_PROTOCOL_FEATURES \
    ((1ULL << VHOST_USER_PROTOCOL_F_MQ) | \
     (1ULL << VHOST_USER_PROTOCOL_F_LOG_SHMFD) | \
     (1ULL << VHOST_USER_PROTOCOL_F_REPLY_ACK) | \
     (1ULL << VHOST_USER_PROTOCOL_F_CONFIG) | \
     (1ULL << VHOST_USER_PROTOCOL_F_RESET_DEVICE) | \
     (1ULL << VHOST_USER_PROTOCOL_F_CONFIGURE_MEM_SLOTS))

static const struct {
    unsigned int bit;
    const char *name;
    const char *property;           /* of the device, or NULL */
} needed_features[] = {
    { VIRTIO_F_VERSION_1, "VIRTIO_F_VERSION_1" },
    { VIRTIO_F_IN_ORDER, "VIRTIO_F_IN_ORDER", "in_order" },
    { VIRTIO_RING_F_INDIRECT_DESC, "VIRTIO_RING_F_INDIRECT_DESC",
      "indirect_desc" },
    { VIRTIO_RING_F_EVENT_IDX, "VIRTIO_RING_F_EVENT_IDX", "event_idx" },
    { VIRTIO_TMEM_F_RETAIN, "VIRTIO_TMEM_F_RETAIN", "retain" },
}, needed_protocol_features[] = {
    { VHOST_USER_PROTOCOL_F_MQ, "VHOST_USER_PROTOCOL_F_MQ" },
    { VHOST_USER_PROTOCOL_F_REPLY_ACK, "VHOST_USER_PROTOCOL_F_REPLY_ACK" },
    { VHOST_USER_PROTOCOL_F_CONFIG, "VHOST_USER_PROTOCOL_F_CONFIG" },
    { VHOST_USER_PROTOCOL_F_RESET_DEVICE,
      "VHOST_USER_PROTOCOL_F_RESET_DEVICE" },
};

/* Generation, state and error, with the interrupt and QMP event of a change */

static void vhost_user_tmem_changed(VHostUserTmem *s)
{
    s->changed = true;
    qemu_bh_schedule(s->bh);
}

bool vhost_user_tmem_connected(VHostUserTmem *s)
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

uint64_t vhost_user_tmem_generation(VHostUserTmem *s)
{
    return le64_to_cpu(s->config.generation);
}

/*
 * Raises the interrupt from the bottom half: during set_status, DRIVER_OK is
 * not recorded yet, so virtio_notify_config() would do nothing. A stopped VM
 * gets the interrupt when it continues.
 */
void vhost_user_tmem_notify(VHostUserTmem *s)
{
    s->notify = true;
    qemu_bh_schedule(s->bh);
}

void vhost_user_tmem_set_generation(VHostUserTmem *s,
                                    uint64_t generation)
{
    trace_vhost_user_tmem_generation(s, generation);
    s->config.generation = cpu_to_le64(generation);
    /*
     * A driver reads the 64-bit number in two halves, and reads it again if
     * the configuration's generation has changed. The interrupt also changes
     * that number, but later or not at all.
     */
    VIRTIO_DEVICE(s)->generation++;
    vhost_user_tmem_changed(s);
}

/* Refusal of a backend */

/* Ends the connection, which the chardev then reports as closed. */
static void vhost_user_tmem_drop(VHostUserTmem *s)
{
    qemu_chr_fe_disconnect(&s->chardev);
}

static char *vhost_user_tmem_timeout_error(VHostUserTmem *s)
{
    return g_strdup_printf("the backend did not answer within %u ms",
                           s->backend_timeout_ms);
}

/*
 * Refuses the backend, and reports the reason unless it equals the last one: a
 * chardev that reconnects soon offers the same backend again. @since_ms is the
 * time at which QEMU began to wait for the backend.
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
     * The guest has read the limits from the device before a backend was
     * connected, so they cannot be lowered to the limits of this backend.
     */
    if (le32_to_cpu(config->page_size) != VIRTIO_TMEM_PAGE_SIZE ||
        le16_to_cpu(config->batch_max) < VIRTIO_TMEM_BATCH_MAX ||
        le32_to_cpu(config->pools_max) < VIRTIO_TMEM_POOLS_MAX) {
        error_setg(errp, "the backend has page_size %u, batch_max %u, "
                   "pools_max %u; the device needs page_size %u, "
                   "batch_max >= %u, pools_max >= %u",
                   le32_to_cpu(config->page_size),
                   le16_to_cpu(config->batch_max),
                   le32_to_cpu(config->pools_max), VIRTIO_TMEM_PAGE_SIZE,
                   VIRTIO_TMEM_BATCH_MAX, VIRTIO_TMEM_POOLS_MAX);
        return false;
    }
    return true;
}

/* Start and stop */

static bool vhost_user_tmem_start(VHostUserTmem *s, Error **errp)
{
    VirtIODevice *vdev = VIRTIO_DEVICE(s);
    BusState *qbus = BUS(qdev_get_parent_bus(DEVICE(vdev)));
    VirtioBusClass *k = VIRTIO_BUS_GET_CLASS(qbus);
    struct virtio_tmem_config config;
    int i, ret;

    if (!k->set_guest_notifiers) {
        error_setg(errp, "the virtio bus does not support guest notifiers");
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

    /* The driver may have accepted features that the backend lacks. */
    s->dev.acked_features = vdev->guest_features & s->dev.features;

    /* The device has no guest_notifier_mask; virtio-pci does not need one. */
    for (i = 0; i < s->dev.nvqs; i++) {
        /* Discards an error of an earlier start. */
        event_notifier_test_and_clear(&s->vhost_vqs[i].error_notifier);
        vhost_virtqueue_mask(&s->dev, vdev, i, false);
    }

    ret = vhost_dev_start(&s->dev, vdev, true);
    if (ret < 0) {
        error_setg_errno(errp, -ret, "cannot start the backend");
        /* A late failure of vhost_dev_start() leaves this notifier behind. */
        event_notifier_cleanup(
            &s->vhost_vqs[VHOST_QUEUE_NUM_CONFIG_INR].masked_config_notifier);
        goto err_guest_notifiers;
    }
    if (s->state != VHOST_USER_TMEM_READY) {
        vhost_user_tmem_set_state(s, VHOST_USER_TMEM_LOST);
        error_setg(errp, "the backend closed the connection");
        return false;
    }
    vhost_user_tmem_set_state(s, VHOST_USER_TMEM_STARTED);

    /*
     * Reads the generation at each start: it is new after a reset and the same
     * after a pause. After a failure the caller disconnects, which stops the
     * device.
     */
    if (!vhost_user_tmem_get_config(s, &config, errp)) {
        return false;
    }
    if (!config.generation) {
        error_setg(errp, "the backend has no generation after its start");
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

/*
 * Stops the backend. The generation stays, because a pause of the VM also stops
 * the backend, and a pause keeps the cache.
 */
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

void vhost_user_tmem_update(VHostUserTmem *s)
{
    int64_t since_ms = qemu_clock_get_ms(QEMU_CLOCK_REALTIME);
    Error *err = NULL;

    if (s->running && s->state == VHOST_USER_TMEM_READY) {
        s->faulty_queue = vhost_user_tmem_find_faulty_queue(s);
        if (s->faulty_queue >= 0) {
            /*
             * This runs during a write of the status register, so the bottom
             * half sets NEEDS_RESET.
             */
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

/* Handles a queue that the backend stopped: only a reset starts it again. */
static void vhost_user_tmem_queue_error(EventNotifier *n)
{
    struct vhost_virtqueue *vq = container_of(n, struct vhost_virtqueue,
                                              error_notifier);
    VHostUserTmem *s = container_of(vq->dev, VHostUserTmem, dev);
    g_autofree char *error = g_strdup_printf(
        "the backend stopped queue %d after an error, see its log",
        (int)(vq - s->vhost_vqs));

    if (!event_notifier_test_and_clear(n) ||
        s->state != VHOST_USER_TMEM_STARTED) {
        return;
    }
    s->running = false;
    vhost_user_tmem_update(s);
    /* Drivers that do not read the status see the generation 0. */
    vhost_user_tmem_set_generation(s, 0);
    vhost_user_tmem_set_error(s, error);
    virtio_error(VIRTIO_DEVICE(s), "vhost-user-tmem %s: the device needs a "
                 "reset: %s", vhost_user_tmem_name(s),
                 error);
}

/* Handshake */

/* Reports a missing feature, with the remedy if a property turns it off. */
static void vhost_user_tmem_lacks(const char *feature, const char *property,
                                  Error **errp)
{
    if (property) {
        error_setg(errp, "the backend lacks the feature %s; set %s=off or "
                   "update the backend (tmemd)", feature, property);
    } else {
        error_setg(errp, "the backend lacks the feature %s; update the backend "
                   "(tmemd)", feature);
    }
}

/* Returns whether the backend has the features and limits of the device. */
static bool vhost_user_tmem_check(VHostUserTmem *s, Error **errp)
{
    VirtIODevice *vdev = VIRTIO_DEVICE(s);
    struct virtio_tmem_config config;
    unsigned int i;

    for (i = 0; i < ARRAY_SIZE(needed_features); i++) {
        if (virtio_has_feature(vdev->host_features, needed_features[i].bit) &&
            !virtio_has_feature(s->dev.features, needed_features[i].bit)) {
            vhost_user_tmem_lacks(needed_features[i].name,
                                  needed_features[i].property, errp);
            return false;
        }
    }
    for (i = 0; i < ARRAY_SIZE(needed_protocol_features); i++) {
        if (!virtio_has_feature(s->dev.protocol_features,
                                needed_protocol_features[i].bit)) {
            error_setg(errp, "the backend lacks the protocol feature %s",
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
        /* vhost_dev_init() has cleaned up by itself. */
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

static void vhost_user_tmem_answered(void *opaque)
{
    VHostUserTmem *s = opaque;

    qemu_bh_schedule(s->bh);
}

static void vhost_user_tmem_probe(VHostUserTmem *s)
{
    s->user.timed_out = false;
    s->state = VHOST_USER_TMEM_PROBING;
    if (!vhost_user_probe_begin(&s->user, vhost_user_tmem_event,
                                vhost_user_tmem_answered, s)) {
        vhost_user_tmem_drop(s);
    }
}

static void vhost_user_tmem_probe_done(VHostUserTmem *s)
{
    Error *err = NULL;

    if (!vhost_user_probe_end(&s->user)) {
        error_setg(&err, "the peer does not speak vhost-user");
        vhost_user_tmem_refuse(s, qemu_clock_get_ms(QEMU_CLOCK_REALTIME), err);
        return;
    }
    vhost_user_tmem_connect(s);
}

/*
 * Probes an open connection, now or when the pause after a refusal or an
 * incoming migration is over.
 */
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

/* Bottom half and events */

static void vhost_user_tmem_bh(void *opaque)
{
    VHostUserTmem *s = opaque;
    VirtIODevice *vdev = VIRTIO_DEVICE(s);

    if (s->state == VHOST_USER_TMEM_LOST) {
        vhost_user_tmem_stop(s);
    }
    if (s->state == VHOST_USER_TMEM_IDLE) {
        /*
         * A backend without dirty log blocks migration only while it is
         * connected.
         */
        migrate_del_blocker(&s->dev.migration_blocker);
        if (qemu_chr_fe_backend_open(&s->chardev)) {
            vhost_user_tmem_begin(s);
        }
    } else if (s->state == VHOST_USER_TMEM_PROBING &&
               vhost_user_probe_is_answered(&s->user)) {
        vhost_user_tmem_probe_done(s);
    }
    if (s->faulty_queue >= 0) {
        if (vhost_user_tmem_generation(s)) {
            /* A pause kept the generation, which is not valid any more. */
            vhost_user_tmem_set_generation(s, 0);
        }
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
        vhost_user_tmem_set_error(s, "the backend closed the connection");
    }
    vhost_user_tmem_set_state(s, vhost_user_tmem_is_started(s) ?
                                 VHOST_USER_TMEM_LOST : VHOST_USER_TMEM_IDLE);
    /*
     * The migration code ignores a device that is not started. While the
     * dirty log is on, the device stays started: QEMU reads the last pages
     * that the backend wrote when it stops a started device.
     */
    if (!s->dev.log_enabled) {
        s->dev.started = false;
    }
    if (vhost_user_tmem_generation(s)) {
        /* QEMU closes its chardevs when it ends, which is no loss. */
        if (!runstate_check(RUN_STATE_SHUTDOWN)) {
            warn_report("vhost-user-tmem %s: lost its backend: %s; "
                        "the guest continues without the cache",
                        vhost_user_tmem_name(s), s->last_error);
        }
        vhost_user_tmem_set_generation(s, 0);
        s->notify = true;
    }
}

/*
 * Handles an event of the chardev. It may come from inside any vhost call, in
 * any thread that holds the big QEMU lock. So the handler only records the
 * event and leaves the work to the bottom half.
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
        /* These events do not concern a socket. */
        break;
    }
}

/* Initialization and cleanup */

bool vhost_user_tmem_backend_init(VHostUserTmem *s, Error **errp)
{
    if (!vhost_user_init(&s->user, &s->chardev, errp)) {
        return false;
    }
    vhost_user_set_timeout(&s->user, s->backend_timeout_ms);
    s->user.supports_config = true;
    s->user.protocol_features = TMEM_PROTOCOL_FEATURES;
    s->user.closed = true;
    s->last_error = g_strdup("no backend has connected yet");
    s->vhost_vqs = g_new0(struct vhost_virtqueue,
                          vhost_user_tmem_num_virtqs(s));
    s->bh = qemu_bh_new_guarded(vhost_user_tmem_bh, s,
                                &DEVICE(s)->mem_reentrancy_guard);
    s->retry_timer = timer_new_ms(QEMU_CLOCK_REALTIME, vhost_user_tmem_bh, s);
    return true;
}

void vhost_user_tmem_backend_open(VHostUserTmem *s)
{
    qemu_chr_fe_set_handlers(&s->chardev, NULL, NULL, vhost_user_tmem_event,
                             NULL, s, NULL, true);
}

void vhost_user_tmem_backend_cleanup(VHostUserTmem *s)
{
    qemu_chr_fe_set_handlers(&s->chardev, NULL, NULL, NULL, NULL, NULL, NULL,
                             false);
    if (s->dev.vhost_ops) {
        vhost_dev_cleanup(&s->dev);
    }
    qemu_bh_delete(s->bh);
    timer_free(s->retry_timer);

    /* The backend unmaps the guest's memory when its connection ends. */
    vhost_user_tmem_drop(s);
    vhost_user_cleanup(&s->user);
    g_free(s->vhost_vqs);
    g_clear_pointer(&s->last_error, g_free);
    g_clear_pointer(&s->reported_error, g_free);
}
