/*
 * vhost-user transcendent memory device
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The guest puts copies of page-cache pages that it evicts into a backend on
 * the host and gets them back when it misses them. Without a backend the guest
 * loses nothing but speed. So the device starts without a backend, outlives any
 * number of backends, and answers the guest from what it has cached.
 *
 * This file has the virtio device and its properties. The connection is in
 * vhost-user-tmem-backend.c, checks of guest memory are in
 * vhost-user-tmem-memory.c.
 */

#include "qemu/osdep.h"
#include "qapi/error.h"
#include "qemu/error-report.h"
#include "qemu/host-utils.h"
#include "qapi/qapi-events-virtio.h"
#include "qapi/visitor.h"
#include "chardev/char.h"
#include "hw/boards.h"
#include "hw/qdev-properties.h"
#include "hw/qdev-properties-system.h"
#include "hw/virtio/vhost-user-tmem.h"
#include "hw/virtio/virtio-bus.h"
#include "hw/virtio/virtio-mmio.h"

/*
 * Feature bits that the device may offer. The backend must have the ones that
 * the device offers, with two exceptions. An older backend answers LATENCIES
 * requests with UNSUPPORTED. SWAP is a wish of the user, with which the
 * backend has nothing to do.
 */
#define TMEM_FEATURES ((1ULL << VIRTIO_F_VERSION_1) | \
                       (1ULL << VIRTIO_F_IN_ORDER) | \
                       (1ULL << VIRTIO_RING_F_INDIRECT_DESC) | \
                       (1ULL << VIRTIO_RING_F_EVENT_IDX) | \
                       (1ULL << VIRTIO_TMEM_F_RETAIN) | \
                       (1ULL << VIRTIO_TMEM_F_LATENCIES) | \
                       (1ULL << VIRTIO_TMEM_F_SWAP))

QEMU_BUILD_BUG_ON(sizeof(struct virtio_tmem_config) != 32);

/* Returns the id that the user gave the device, or NULL. */
static const char *vhost_user_tmem_id(VHostUserTmem *s)
{
    DeviceState *proxy = qdev_get_parent_bus(DEVICE(s))->parent;

    if (DEVICE(s)->id) {
        return DEVICE(s)->id;
    }
    return proxy ? proxy->id : NULL;
}

const char *vhost_user_tmem_name(VHostUserTmem *s)
{
    const char *id = vhost_user_tmem_id(s);

    return id ? id : s->chardev.chr->label;
}

unsigned int vhost_user_tmem_num_virtqs(VHostUserTmem *s)
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

/* Functions of the virtio device */

static void vhost_user_tmem_read_config(VirtIODevice *vdev, uint8_t *config)
{
    VHostUserTmem *s = VHOST_USER_TMEM(vdev);

    memcpy(config, &s->config, sizeof(s->config));
}

static uint64_t vhost_user_tmem_get_features(VirtIODevice *vdev,
                                             uint64_t features, Error **errp)
{
    /* Only properties decide; a backend that lacks a feature is refused. */
    virtio_add_feature(&features, VIRTIO_F_VERSION_1);
    return features & TMEM_FEATURES;
}

/*
 * Sets the queue sizes to the property. In QEMU 10.0.13 to 11.1, a queue has
 * the largest possible size when it is added and after a reset. The driver
 * reads the size after its first write of the status, which calls this
 * function.
 */
static void vhost_user_tmem_set_queue_sizes(VHostUserTmem *s)
{
    unsigned int i;

    for (i = 0; i < vhost_user_tmem_num_virtqs(s); i++) {
        virtio_queue_set_num(VIRTIO_DEVICE(s), i, s->queue_size);
        /* The caches of rings that the driver has set up depend on the size. */
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
        /* A restored guest may have read another generation before. */
        vhost_user_tmem_notify(s);
    }
    s->running = running;
    vhost_user_tmem_update(s);
}

/* Resets the device after virtio_reset() has sent RESET_DEVICE. */
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
 * Ignores kicks that reach QEMU: no backend is started then. The requests wait
 * until a backend starts, because each start kicks every queue.
 */
static void vhost_user_tmem_handle_output(VirtIODevice *vdev, VirtQueue *vq)
{
}

/* Realize and unrealize */

static bool vhost_user_tmem_check_properties(VHostUserTmem *s, Error **errp)
{
    VirtIODevice *vdev = VIRTIO_DEVICE(s);
    Object *mmio = object_dynamic_cast(
        OBJECT(qdev_get_parent_bus(DEVICE(s))->parent), TYPE_VIRTIO_MMIO);

    if (!s->chardev.chr) {
        error_setg(errp, "vhost-user-tmem has no chardev. Set chardev=ID "
                   "of a socket chardev");
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
        error_setg(errp, "vhost-user-tmem: backend-timeout-ms=0 would let a "
                   "hung backend stop the VM; set more than 0");
        return false;
    }
    if (mmio && VIRTIO_MMIO(mmio)->legacy) {
        error_setg(errp, "vhost-user-tmem is not a legacy device: start QEMU "
                   "with -global virtio-mmio.force-legacy=false");
        return false;
    }
    if (virtio_host_has_feature(vdev, VIRTIO_F_RING_PACKED)) {
        error_setg(errp, "vhost-user-tmem does not support packed=on, "
                   "because a new backend continues at the index of a split "
                   "ring");
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
        !vhost_user_tmem_memory_check(s, errp)) {
        return;
    }

    s->num_queues = vhost_user_tmem_num_queues(s);
    nvqs = vhost_user_tmem_num_virtqs(s);
    s->faulty_queue = -1;
    if (!vhost_user_tmem_backend_init(s, errp)) {
        return;
    }

    virtio_init(vdev, VIRTIO_ID_TMEM, sizeof(s->config));
    s->config = (struct virtio_tmem_config) {
        .page_size = cpu_to_le32(VIRTIO_TMEM_PAGE_SIZE),
        .num_request_queues = cpu_to_le16(s->num_queues),
        .batch_max = cpu_to_le16(VIRTIO_TMEM_BATCH_MAX),
        .pools_max = cpu_to_le32(VIRTIO_TMEM_POOLS_MAX),
    };

    s->virtqs = g_new(VirtQueue *, nvqs);
    for (i = 0; i < nvqs; i++) {
        s->virtqs[i] = virtio_add_queue(vdev, s->queue_size,
                                        vhost_user_tmem_handle_output);
    }

    vhost_user_tmem_memory_init(s);
    vhost_user_tmem_backend_open(s);
}

static void vhost_user_tmem_unrealize(DeviceState *dev)
{
    VirtIODevice *vdev = VIRTIO_DEVICE(dev);
    VHostUserTmem *s = VHOST_USER_TMEM(dev);
    unsigned int i;

    virtio_set_status(vdev, 0);
    vhost_user_tmem_backend_cleanup(s);
    vhost_user_tmem_memory_cleanup(s);
    for (i = 0; i < vhost_user_tmem_num_virtqs(s); i++) {
        virtio_delete_queue(s->virtqs[i]);
    }
    g_free(s->virtqs);
    g_clear_pointer(&s->last_event, g_free);
    virtio_cleanup(vdev);
}

/* Clears the generation in the configuration that virtio_save() writes. */
static int vhost_user_tmem_pre_save(void *opaque)
{
    VirtIODevice *vdev = VIRTIO_DEVICE(opaque);

    memset(vdev->config + offsetof(struct virtio_tmem_config, generation), 0,
           sizeof_field(struct virtio_tmem_config, generation));
    return 0;
}

static bool vhost_user_tmem_retains(VHostUserTmem *s)
{
    return virtio_host_has_feature(VIRTIO_DEVICE(s), VIRTIO_TMEM_F_RETAIN);
}

static bool vhost_user_tmem_retain_needed(void *opaque)
{
    return vhost_user_tmem_retains(opaque);
}

static int vhost_user_tmem_retain_pre_save(void *opaque)
{
    VHostUserTmem *s = opaque;

    s->source_retain = true;
    return 0;
}

static int vhost_user_tmem_features_pre_load(void *opaque)
{
    VHostUserTmem *s = opaque;

    s->source_retain = false;
    return 0;
}

static int vhost_user_tmem_features_post_load(void *opaque, int version_id)
{
    VHostUserTmem *s = opaque;
    bool retain = vhost_user_tmem_retains(s);

    if (s->source_retain == retain) {
        return 0;
    }
    error_report("vhost-user-tmem %s: the source has retain=%s and the "
                 "destination has retain=%s. Start the destination with "
                 "retain=%s", vhost_user_tmem_name(s),
                 s->source_retain ? "on" : "off", retain ? "on" : "off",
                 s->source_retain ? "on" : "off");
    return -EINVAL;
}

/* The stream contains this subsection only if the source has retain=on. */
static const VMStateDescription vmstate_vhost_user_tmem_retain = {
    .name = "vhost-user-tmem-features/retain",
    .minimum_version_id = 1,
    .version_id = 1,
    .needed = vhost_user_tmem_retain_needed,
    .pre_save = vhost_user_tmem_retain_pre_save,
    .fields = (const VMStateField[]) {
        VMSTATE_BOOL(source_retain, VHostUserTmem),
        VMSTATE_END_OF_LIST()
    },
};

/*
 * Adds no byte to the stream with retain=off, so that the state can go to and
 * come from a QEMU without the property. virtio_load() loads this part before
 * it checks the features that the driver accepted, and so the message of a
 * mismatch names the property.
 */
static const VMStateDescription vmstate_vhost_user_tmem_features = {
    .name = "vhost-user-tmem-features",
    .minimum_version_id = 1,
    .version_id = 1,
    .pre_load = vhost_user_tmem_features_pre_load,
    .post_load = vhost_user_tmem_features_post_load,
    .fields = (const VMStateField[]) {
        VMSTATE_END_OF_LIST()
    },
    .subsections = (const VMStateDescription * const []) {
        &vmstate_vhost_user_tmem_retain,
        NULL
    },
};

/*
 * Has no state of the backend, which is only a cache. The fields are values
 * that the guest has read and that the destination cannot change.
 */
static const VMStateDescription vmstate_vhost_user_tmem = {
    .name = "vhost-user-tmem",
    .minimum_version_id = 1,
    .version_id = 1,
    .pre_save = vhost_user_tmem_pre_save,
    .fields = (const VMStateField[]) {
        VMSTATE_UINT16_EQUAL(num_queues, VHostUserTmem,
                             "num-queues of vhost-user-tmem must be equal at "
                             "both ends; it defaults to the number of CPUs"),
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
    /*
     * Off by default: a backend that lacks the feature is refused, and the
     * guest would then have no cache.
     */
    DEFINE_PROP_BIT64("retain", VHostUserTmem, parent_obj.host_features,
                      VIRTIO_TMEM_F_RETAIN, false),
    DEFINE_PROP_BIT64("swap", VHostUserTmem, parent_obj.host_features,
                      VIRTIO_TMEM_F_SWAP, false),
};

/* Properties and event for management software */

void vhost_user_tmem_send_event(VHostUserTmem *s)
{
    g_autofree char *path = object_get_canonical_path(OBJECT(s));
    g_autofree char *event = g_strdup_printf(
        "%d %" PRIx64 " %s", vhost_user_tmem_connected(s),
        vhost_user_tmem_generation(s), s->last_error ?: "");

    /* The last event was equal, as when a backend is refused repeatedly. */
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
    vdc->vmsd = &vmstate_vhost_user_tmem_features;
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
