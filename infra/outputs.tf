output "settings" {
  value       = local.settings
  description = "Settings of a cycle on this fleet, for trnjobs --config."
}

output "settings_files" {
  value       = var.settings_files
  description = "Files that the settings go over: --config before build/infra.json."
}

output "fleet" {
  value = [
    {
      queue          = module.queues.trainium_queue.name
      type           = "EC2"
      max_vcpus      = local.max_vcpus
      instance_types = [var.instance_type]
      shares         = keys(var.shares)
    },
    {
      queue          = module.queues.cpu_queue.name
      type           = var.cpu.spot ? "SPOT" : "EC2"
      max_vcpus      = var.cpu.max_vcpus
      instance_types = var.cpu.instance_types
      shares         = keys(var.shares)
    },
  ]
  description = "What the queues can run, known before anything is made: trnjobs fit holds a plan of a cycle against it."
}

output "workspace" {
  value       = module.storage.workspace
  description = "Where cycles read and write."
}

output "repository_url" {
  value       = module.storage.repository_url
  description = "Where make push sends images."
}

output "queues" {
  value       = { trainium = module.queues.trainium_queue.arn, cpu = module.queues.cpu_queue.arn }
  description = "ARNs of the queues."
}

output "log_group" {
  value       = module.storage.log_group
  description = "Log group of all jobs."
}

output "topic_arn" {
  value       = module.alarms.topic_arn
  description = "Where alarms are published."
}

output "schedule" {
  value = {
    group       = module.schedule.group_name
    driver      = module.schedule.driver_schedule_name
    watch       = module.schedule.watch_schedule_name
    dead_letter = module.schedule.dead_letter_arn
  }
  description = "Schedules of EventBridge Scheduler, and the queue of what they could not deliver."
}
