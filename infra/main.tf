# From the ground up: storage, network, machines, queues, rights, schedule, alarms. One module each.

data "aws_caller_identity" "current" {}

locals {
  account_id = data.aws_caller_identity.current.account_id
  max_vcpus  = var.max_nodes * local.trainium[var.instance_type].vcpus
}

module "storage" {
  source = "./modules/storage"

  name               = var.name
  account_id         = local.account_id
  region             = var.region
  log_retention_days = var.log_retention_days
  emulator           = var.emulator
  force_destroy      = var.force_destroy
}

module "network" {
  source = "./modules/network"

  name               = var.name
  account_id         = local.account_id
  region             = var.region
  availability_zone  = var.availability_zone
  cidr               = var.vpc_cidr
  key_arn            = module.storage.key_arn
  log_retention_days = var.log_retention_days
  more_services = concat(
    var.sagemaker ? ["sagemaker.api"] : [],    # the watch asks for training jobs from inside
    var.signing_key_arn == null ? [] : ["kms"] # evaluate signs the model that it promotes
  )
}

module "compute" {
  source = "./modules/compute"

  name              = var.name
  emulator          = var.emulator
  subnet_id         = module.network.subnet_id
  security_group_id = module.network.nodes_security_group_id
  instance_type     = var.instance_type
  max_vcpus         = local.max_vcpus
  efa_interfaces    = local.trainium[var.instance_type].efa_interfaces
  ami_id            = var.ami_id
  capacity_block_id = var.capacity_block_id
  root_volume_gib   = var.root_volume_gib
  stop_timeout_s    = var.stop_timeout_s
  cpu               = var.cpu
}

module "queues" {
  source = "./modules/queues"

  name                     = var.name
  trainium_environment_arn = module.compute.trainium_environment_arn
  cpu_environment_arn      = module.compute.cpu_environment_arn
  shares                   = var.shares
  share_decay_s            = var.share_decay_s
  compute_reservation      = var.compute_reservation
  wait_limit_s             = var.queue_wait_limit_s
}

module "roles" {
  source = "./modules/roles"

  name               = var.name
  account_id         = local.account_id
  region             = var.region
  bucket_arn         = module.storage.bucket_arn
  workspace_arn      = module.storage.workspace_arn
  data               = var.data
  key_arn            = module.storage.key_arn
  log_group_arn      = module.storage.log_group_arn
  queue_arns         = [module.queues.trainium_queue.arn, module.queues.cpu_queue.arn]
  schedule_queue_arn = module.queues.cpu_queue.arn
  share_identifier   = var.share_identifier
  sagemaker          = var.sagemaker
  signing_key_arn    = var.signing_key_arn
}

module "schedule" {
  source = "./modules/schedule"

  name               = var.name
  image              = var.cpu_image
  settings_files     = var.settings_files
  environment        = local.environment
  queue_arn          = module.queues.cpu_queue.arn
  share_identifier   = var.share_identifier
  driver_role_arn    = module.roles.driver_role_arn
  scheduler_role_arn = module.roles.scheduler_role_arn
  expression         = var.schedule_expression
  timezone           = var.timezone
  enabled            = var.schedule_enabled
  watch_expression   = var.watch_expression
  attempts           = var.driver_attempts
  log_group          = module.storage.log_group
  key_arn            = module.storage.key_arn
}

module "alarms" {
  source = "./modules/alarms"

  name             = var.name
  account_id       = local.account_id
  queue_arns       = [module.queues.trainium_queue.arn, module.queues.cpu_queue.arn]
  log_group        = module.storage.log_group
  schedule_enabled = var.schedule_enabled
  dead_letter_name = module.schedule.dead_letter_name
  emails           = var.notify_emails
  budget_usd       = var.budget_usd
  key_arn          = module.storage.key_arn
}

module "sagemaker" {
  source = "./modules/sagemaker"
  count  = var.sagemaker ? 1 : 0

  name                  = var.name
  account_id            = local.account_id
  region                = var.region
  driver_role           = module.roles.job_roles["driver"]
  report_role           = module.roles.job_roles["report"]
  training_roles        = [for kind in ["train", "promote", "embed", "report"] : module.roles.job_roles[kind]]
  workspace_arn         = module.storage.workspace_arn
  repository_arn        = module.storage.repository_arn
  subnet_id             = module.network.subnet_id
  security_group_id     = module.network.nodes_security_group_id
  log_retention_days    = var.log_retention_days
  topic_arn             = module.alarms.topic_arn
  instances             = var.sagemaker_instances
  scheduling_policy_arn = module.queues.scheduling_policy_arn
  share_identifier      = var.share_identifier
  wait_limit_s          = var.queue_wait_limit_s
}
