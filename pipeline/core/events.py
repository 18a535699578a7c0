"""The closed list of event names. Every line of events.jsonl carries one of them."""

from enum import StrEnum


class EventName(StrEnum):
    """What can happen in a cycle. Readers may rely on these names; adding one is a reviewed change."""

    STAGE_STARTED = "stage_started"
    STAGE_SKIPPED = "stage_skipped"
    STAGE_FINISHED = "stage_finished"
    STAGE_FAILED = "stage_failed"
    STAGE_STOPPED = "stage_stopped"
    PARTITION_REUSED = "partition_reused"
    PARTITION_PREPARED = "partition_prepared"
    ROWS_QUARANTINED = "rows_quarantined"
    TOKENIZER_TRAINED = "tokenizer_trained"
    TRAIN_STARTED = "train_started"
    TRAIN_RESUMED = "train_resumed"
    TRAIN_STEPS = "train_steps"
    STEP_SKIPPED = "step_skipped"
    GRAPH_COMPILED = "graph_compiled"
    CACHE_REPAIRED = "cache_repaired"
    HOLDOUT_EVALUATED = "holdout_evaluated"
    GATE_JUDGED = "gate_judged"
    DEADLINE_AT_RISK = "deadline_at_risk"
    CHECKPOINT_SAVED = "checkpoint_saved"
    CHECKPOINT_FAILED = "checkpoint_failed"
    CHECKPOINT_REJECTED = "checkpoint_rejected"
    CHECKPOINT_DELETED = "checkpoint_deleted"
    EMBED_STARTED = "embed_started"
    PART_EMBEDDED = "part_embedded"
    STOP_REQUESTED = "stop_requested"
