/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * vhost-user transcendent memory device: state of one device.
 *
 * The device is complete without a backend: queues, features and configuration
 * space come from its properties alone, and only the generation tells the guest
 * whether a backend is there.
 */
#ifndef HW_VIRTIO_VHOST_USER_TMEM_H
#define HW_VIRTIO_VHOST_USER_TMEM_H

#include "chardev/char-fe.h"
#include "hw/virtio/vhost.h"
#include "hw/virtio/vhost-user.h"
#include "hw/virtio/virtio.h"
#include "qemu/timer.h"
#include "qom/object.h"
#include "standard-headers/linux/virtio_tmem.h"

#define TYPE_VHOST_USER_TMEM "vhost-user-tmem"
OBJECT_DECLARE_SIMPLE_TYPE(VHostUserTmem, VHOST_USER_TMEM)

/* num-queues=0 means one request queue per vCPU, but at most this many. */
#define VHOST_USER_TMEM_AUTO_QUEUES_MAX 4

/* A vhost-user header and the u64 that answers GET_FEATURES. */
#define VHOST_USER_TMEM_PROBE_SIZE (12 + 8)

struct VHostUserTmem {
    VirtIODevice parent_obj;

    /* Properties, fixed from realize on. */
    CharBackend chardev;
    uint16_t num_queues;            /* request queues, without control */
    uint16_t queue_size;            /* descriptors in each queue */
    uint32_t backend_timeout_ms;    /* longest wait for one answer */

    /* What the guest reads; only the generation ever changes. */
    struct virtio_tmem_config config;

    /* Valid from connect to disconnect, zeroed (vhost_ops NULL) otherwise. */
    struct vhost_dev dev;
    struct vhost_virtqueue *vhost_vqs;
    VirtQueue **virtqs;

    /*
     * user.chr is &chardev while the vhost_dev above belongs to the open
     * connection, else &no_chardev, which has no driver: every message fails
     * at once and none can reach the connection that came after.
     */
    VhostUserState user;
    CharBackend no_chardev;

    bool opened;                    /* the chardev has a connection */
    bool probing;                   /* GET_FEATURES is sent on it, unanswered */
    bool connected;                 /* dev is initialised */
    bool started;                   /* the backend serves the queues */
    bool lost;                      /* dev's connection is gone, clean up */
    bool running;                   /* driver is up and the VM runs */
    bool notify;                    /* config interrupt is due */
    uint8_t probe_reply[VHOST_USER_TMEM_PROBE_SIZE];
    unsigned int probe_len;         /* bytes of probe_reply received */

    /* Does all work that an event may not do in place. */
    QEMUBH *bh;

    /* Refusals are told once, and the next attempt is put off. */
    QEMUTimer *retry_timer;
    int64_t retry_at_ms;            /* realtime clock; no probe before it */
    char *last_error;               /* refusal told last */
};

/**
 * vhost_user_tmem_num_queues() - request queues that the device will have
 * @s: device, not necessarily realized
 *
 * Returns: the property, or what 0 stands for on this machine.
 */
uint16_t vhost_user_tmem_num_queues(VHostUserTmem *s);

#endif
