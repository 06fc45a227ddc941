"""torch's two functions on chunks that overlap, under torch's module name; they take chunks of either library."""

from __future__ import annotations

from holdfast._torch_classes.torchs import resharding as _torchs

_check_shard_metadata_pair_overlap = _torchs._check_shard_metadata_pair_overlap
_shards_get_overlap_region_wrt_saved_tensor = _torchs._shards_get_overlap_region_wrt_saved_tensor
