/*
 * vhost-user transcendent memory device: guest memory that the backend maps
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The backend reads and writes guest memory through its own mapping. The
 * mapping must cover all memory of the guest before the backend uses it.
 */

#include "qemu/osdep.h"
#include "qapi/error.h"
#include "qemu/units.h"
#include "hw/boards.h"
#include "hw/mem/memory-device.h"
#include "hw/virtio/vhost-user-tmem.h"
#include "migration/misc.h"
#include "standard-headers/linux/vhost_types.h"
#include "system/hostmem.h"
#include "system/runstate.h"

static bool vhost_user_tmem_ram_is_shared(MemoryRegion *mr)
{
    MemoryRegion *sub;

    if (memory_region_is_ram(mr)) {
        return memory_region_get_fd(mr) >= 0 &&
               qemu_ram_is_shared(mr->ram_block);
    }
    /* With NUMA nodes, the RAM is a container of the nodes' backends. */
    QTAILQ_FOREACH(sub, &mr->subregions, subregions_link) {
        if (!vhost_user_tmem_ram_is_shared(sub)) {
            return false;
        }
    }
    return true;
}

/*
 * Checks the backend that a memory device names in its property memdev. A
 * device whose memory is a container of aliases has the property, too.
 */
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
 * Refuses background snapshots. They write-protect QEMU's mapping of the
 * guest's memory, so they would miss writes of the backend through its own
 * mapping.
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

bool vhost_user_tmem_memory_check(VHostUserTmem *s, Error **errp)
{
    if (current_machine->cgs) {
        error_setg(errp, "vhost-user-tmem cannot be used in a guest with "
                   "encrypted memory: the backend must read its pages");
        return false;
    }
    if (virtio_host_has_feature(VIRTIO_DEVICE(s), VIRTIO_F_IOMMU_PLATFORM)) {
        error_setg(errp, "vhost-user-tmem does not support "
                   "iommu_platform=on: the backend takes guest physical "
                   "addresses");
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

void vhost_user_tmem_memory_init(VHostUserTmem *s)
{
    s->memory_notifier.notify = vhost_user_tmem_pre_plug;
    memory_device_add_pre_plug_notifier(&s->memory_notifier);
    migration_add_notifier(&s->migration_notifier, vhost_user_tmem_migration);
}

void vhost_user_tmem_memory_cleanup(VHostUserTmem *s)
{
    migration_remove_notifier(&s->migration_notifier);
    notifier_with_return_remove(&s->memory_notifier);
}

/*
 * Returns whether an incoming migration has not yet brought all pages. A
 * backend that maps the memory would see holes then, even after the guest has
 * started.
 */
bool vhost_user_tmem_memory_is_incoming(void)
{
    return runstate_check(RUN_STATE_INMIGRATE) ||
           migration_in_incoming_postcopy();
}

/* Returns whether one memory region of the backend contains the range. */
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

/* Returns the number of a queue whose ring is outside of memory, or -1. */
int vhost_user_tmem_find_faulty_queue(VHostUserTmem *s)
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
