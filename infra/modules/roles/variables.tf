variable "name" {
  description = "First word of all names; jobs.name of the pipeline's settings, and the value of the tag `pipeline` of its jobs."
  type        = string
}

variable "account_id" {
  description = "Id of the AWS account."
  type        = string
}

variable "region" {
  description = "AWS region of everything the roles may use."
  type        = string
}

variable "bucket_arn" {
  description = "ARN of the bucket that holds the workspace."
  type        = string
}

variable "workspace_arn" {
  description = "ARN of the workspace: that of the bucket, a slash, name."
  type        = string
}

variable "data" {
  description = "Inputs to read: bucket (a name), prefix (a file or a folder; empty: the whole bucket) and, where it has one, the ARN of the key that encrypts them."
  type        = list(object({ bucket = string, prefix = string, kms_key_arn = optional(string) }))
  default     = []
}

variable "key_arn" {
  description = "ARN of the KMS key of the workspace and of the dead-letter queue."
  type        = string
}

variable "signing_key_arn" {
  description = "ARN of the KMS key that signs promoted models; null if none does."
  type        = string
  default     = null
}

variable "log_group_arn" {
  description = "ARN of the log group of all jobs."
  type        = string
}

variable "queue_arns" {
  description = "ARNs of the job queues that the driver submits stages to."
  type        = list(string)
}

variable "schedule_queue_arn" {
  description = "ARN of the one job queue that the schedules may submit to."
  type        = string
}

variable "share_identifier" {
  description = "The one fair share that the driver and the schedules may submit under."
  type        = string
}

variable "sagemaker" {
  description = "Whether training jobs of SageMaker may take on the roles of the stages, too."
  type        = bool
  default     = false
}
