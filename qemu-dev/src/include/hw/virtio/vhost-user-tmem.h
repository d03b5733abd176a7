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
#include "qemu/notify.h"
#include "qemu/timer.h"
#include "qom/object.h"
#include "standard-headers/linux/virtio_tmem.h"

#define TYPE_VHOST_USER_TMEM "vhost-user-tmem"
OBJECT_DECLARE_SIMPLE_TYPE(VHostUserTmem, VHOST_USER_TMEM)

/* num-queues=0 means one request queue per vCPU, but at most this many. */
#define VHOST_USER_TMEM_AUTO_QUEUES_MAX 4

/* State of the backend; vhost-user-tmem-backend.c has a diagram. */
typedef enum VHostUserTmemState {
    VHOST_USER_TMEM_IDLE,       /* no backend, or none that was asked yet */
    VHOST_USER_TMEM_PROBING,    /* GET_FEATURES is sent, unanswered */
    VHOST_USER_TMEM_READY,      /* the handshake is under way or done */
    VHOST_USER_TMEM_STARTED,    /* the backend serves the queues */
    VHOST_USER_TMEM_LOST,       /* the connection ended while STARTED */
} VHostUserTmemState;

struct VHostUserTmem {
    VirtIODevice parent_obj;

    /* Properties, fixed from realize on. */
    CharBackend chardev;
    uint16_t num_queues;            /* request queues, without control */
    uint16_t queue_size;            /* descriptors in each queue */
    uint32_t backend_timeout_ms;    /* longest wait in one operation */

    /* The configuration space; only the generation ever changes. */
    struct virtio_tmem_config config;

    /*
     * Initialised by a handshake and kept until the next one, so that the
     * backend's limit of memory slots holds while none is connected.
     */
    struct vhost_dev dev;
    struct vhost_virtqueue *vhost_vqs;
    VirtQueue **virtqs;
    VhostUserState user;

    VHostUserTmemState state;
    bool running;                   /* driver is up and the VM runs */
    bool notify;                    /* config interrupt is due */
    bool changed;                   /* QMP event is due */
    int faulty_queue;               /* its ring is not in memory; -1 for none */

    /* Does all work that an event may not do in place. */
    QEMUBH *bh;
    QEMUTimer *retry_timer;
    int64_t retry_at_ms;            /* realtime clock; no probe before it */

    char *last_error;               /* why the backend is refused or lost */
    char *reported_error;           /* refusal written to stderr last */
    char *last_event;               /* content of the QMP event sent last */

    NotifierWithReturn memory_notifier;
    NotifierWithReturn migration_notifier;
};

/**
 * vhost_user_tmem_num_queues() - request queues that the device will have
 * @s: device, not necessarily realized
 *
 * Returns: the property, or what 0 stands for on this machine.
 */
uint16_t vhost_user_tmem_num_queues(VHostUserTmem *s);

/* Between the files of the device: vhost-user-tmem.c */

/* Returns the device's id, or the chardev's where it has none. */
const char *vhost_user_tmem_name(VHostUserTmem *s);

/* Returns the number of request queues and the control queue. */
unsigned int vhost_user_tmem_num_virtqs(VHostUserTmem *s);

/* Sends the QMP event of the present state, unless it was sent last. */
void vhost_user_tmem_send_event(VHostUserTmem *s);

/* vhost-user-tmem-backend.c */

/**
 * vhost_user_tmem_backend_init() - make all that a connection needs
 * @s: device whose properties were checked
 * @errp: why the chardev cannot be used
 *
 * Returns: false on error. Nothing is connected before
 * vhost_user_tmem_backend_open().
 */
bool vhost_user_tmem_backend_init(VHostUserTmem *s, Error **errp);

/* Connects now if the chardev is open, otherwise as soon as it is. */
void vhost_user_tmem_backend_open(VHostUserTmem *s);

/* Ends the connection of a stopped device and frees what init made. */
void vhost_user_tmem_backend_cleanup(VHostUserTmem *s);

/* Starts or stops the backend after a change of @s->running. */
void vhost_user_tmem_update(VHostUserTmem *s);

/* Returns whether a backend passed the handshake. */
bool vhost_user_tmem_connected(VHostUserTmem *s);

/* Returns the generation that the guest reads. */
uint64_t vhost_user_tmem_generation(VHostUserTmem *s);

/* Changes the generation that the guest reads, without an interrupt. */
void vhost_user_tmem_set_generation(VHostUserTmem *s, uint64_t generation);

/* Has a configuration interrupt raised from the bottom half. */
void vhost_user_tmem_notify(VHostUserTmem *s);

/* vhost-user-tmem-memory.c */

/* Checks that a backend can map all memory that the machine has. */
bool vhost_user_tmem_memory_check(VHostUserTmem *s, Error **errp);

/* Begins and ends to refuse private memory and background snapshots. */
void vhost_user_tmem_memory_init(VHostUserTmem *s);
void vhost_user_tmem_memory_cleanup(VHostUserTmem *s);

/* Returns whether a migration has still to bring memory. */
bool vhost_user_tmem_memory_is_incoming(void);

/* Returns a queue that the driver did not put into memory, or -1. */
int vhost_user_tmem_find_faulty_queue(VHostUserTmem *s);

#endif
