variable "name" {
  type        = string
  description = "First word of all names."
}

variable "account_id" {
  type        = string
  description = "Account of the bucket; no other gets in."
}

variable "region" {
  type        = string
  description = "Region of the bucket."
}

variable "log_retention_days" {
  type        = number
  description = "Days that logs of jobs are kept."
}

variable "emulator" {
  type        = bool
  description = "The account is moto."
  default     = false
}

variable "force_destroy" {
  type        = bool
  description = "Destroy the bucket with its objects and the repository with its images."
  default     = false
}
